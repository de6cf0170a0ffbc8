"""Things that a policy must not do and that never come to an end by themselves."""


def loop_forever() -> None:
    """Take processor time."""
    while True:
        pass


def hoard_forever() -> None:
    """Take processor time and memory."""
    kept = []
    while True:
        kept.append(bytearray(4096))
