"""Putting a SQLite file into write-ahead mode while another process does the same.

Leaving a new file's mode needs the whole file, and where waiting could deadlock, SQLite says
`database is locked` at once, without its busy timeout
(<https://sqlite.org/c3ref/busy_handler.html>). That is so when two processes open a new file
together: one of them is refused, and must try again.
"""

import sqlite3
import time

from dsched.clock import SystemClock

RETRY_S = 0.005


def use_write_ahead_log(connection: sqlite3.Connection, *, timeout_s: float) -> None:
    """Set `journal_mode = WAL`; blocks up to `timeout_s` while others hold the file.

    Raises `sqlite3.OperationalError` (`database is locked`) if they hold it longer. For threads
    that wait for files anyway, never for an event loop.
    """
    clock = SystemClock()
    end_ns = clock.now_ns() + int(timeout_s * 1e9)
    while not _try(connection, is_last=clock.now_ns() > end_ns):
        time.sleep(RETRY_S)  # noqa: TID251


def _try(connection: sqlite3.Connection, *, is_last: bool) -> bool:
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or is_last:
            raise
        return False
    return True
