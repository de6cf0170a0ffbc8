"""What the controller tells other dsched processes over the same engines, and hears from them.

Each process tells what it has on every rank of its pools, as it stands (`dsched.routing.peers`):
requests and KV tokens, and of prefill pools the work that is booked. `dsched.registry.peer_channel`
carries it. Nothing here decides anything; a request that waits for a rank is looked at again when a
peer may have made room.

Cost: O(ranks changed) a tick.
"""

from collections.abc import Iterator

from dsched.controller.state import ControllerState
from dsched.routing import peers
from dsched.routing.peers import PeerMessage, PeerPrefillMessage, PeerRankLoad, PeerWorkerLoad
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
        self._prefill_routers = {
            name: pool.prefill for name, pool in state.pools.items() if pool.prefill is not None
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

    def prefill_news(self, *, is_full: bool) -> Iterator[tuple[str, list[PeerWorkerLoad]]]:
        """(pool, work) of each prefill pool with something to tell.

        Workers where something began or ended since the last time, or with `is_full` all workers
        that have something.
        """
        now_ns = self._state.clock.now_ns()
        for name, router in self._prefill_routers.items():
            touched = router.take_touched()
            if is_full:
                loads = peers.own_work(router, range(router.num_workers), now_ns)
                yield name, [one for one in loads if one.work_ns]
            elif touched:
                yield name, peers.own_work(router, touched, now_ns)

    def apply(self, pool: str, message: PeerMessage) -> bool:
        """Believe a peer; `False` for a pool that is not there, or a message that is not new."""
        router = self._routers.get(pool)
        if router is None or not peers.apply_peer_message(router, message):
            return False
        if router.num_held:
            self._state.host.request_tick()
        return True

    def apply_prefills(self, pool: str, message: PeerPrefillMessage) -> bool:
        """Believe a peer's work on prefill workers; `False` as by `apply`."""
        router = self._prefill_routers.get(pool)
        now_ns = self._state.clock.now_ns()
        return router is not None and peers.apply_prefill_message(router, message, now_ns)

    def forget(self, peer: str) -> None:
        """Believe nothing of what a peer said any more."""
        for prefill_router in self._prefill_routers.values():
            prefill_router.forget_peer(peer)
        for router in self._routers.values():
            peers.forget_peer(router, peer)
            if router.num_held:
                self._state.host.request_tick()
