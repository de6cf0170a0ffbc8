"""What the controller tells other dsched processes over the same engines, and hears from them.

Each process tells what it has on every rank of its pools, as it stands (`dsched.routing.peers`);
`dsched.registry.peer_channel` carries it. Prefill pools are left out: their workers' backlog is
corrected by reports alone. Nothing here decides anything; a request that waits for a rank is looked
at again when a peer may have made room.

Cost: O(ranks changed) a tick.
"""

from collections.abc import Iterator

from dsched.controller.state import ControllerState
from dsched.routing import peers
from dsched.routing.peers import PeerMessage, PeerRankLoad
from dsched.states import PoolRole


class Peering:
    """One controller's side of the talk with its peers."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._routers = {
            name: pool.router
            for name, pool in state.pools.items()
            if pool.spec.role is not PoolRole.PREFILL
        }

    def set_listened_to(self, *, is_listened_to: bool) -> None:
        """Whether anybody is told: then the end of a request asks for a tick, and so is told."""
        self._state.tells_peers = is_listened_to

    def news(self, *, is_full: bool) -> Iterator[tuple[str, tuple[PeerRankLoad, ...], int]]:
        """(pool, loads, KV tokens of the longest request) of each pool with something to tell.

        Ranks where something began or ended since the last time, or with `is_full` all ranks where
        something runs.
        """
        for name, router in self._routers.items():
            ledger = router.ledger
            touched = ledger.take_touched()
            if is_full:
                ranks = range(ledger.num_ranks)
                loads = tuple(one for one in peers.own_loads(router, ranks) if one.num_running)
            elif touched:
                loads = peers.own_loads(router, touched)
            else:
                continue
            yield name, loads, router.longest.num_own_tokens()

    def apply(self, pool: str, message: PeerMessage) -> bool:
        """Believe a peer; `False` for a pool that is not there, or a message that is not new."""
        router = self._routers.get(pool)
        if router is None or not peers.apply_peer_message(router, message):
            return False
        if router.num_held:
            self._state.host.request_tick()
        return True

    def forget(self, peer: str) -> None:
        """Believe nothing of what a peer said any more."""
        for router in self._routers.values():
            peers.forget_peer(router, peer)
            if router.num_held:
                self._state.host.request_tick()
