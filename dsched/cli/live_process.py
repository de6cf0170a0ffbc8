"""What the live picture shows of the process itself: budgets, conditions, engines' expert load."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsched import __version__
from dsched.controller import ControllerObserver, HandoffGap
from dsched.drivers.base import ExpertLoad, ExpertLoadSource
from dsched.faults import MembershipView
from dsched.frontdoor.live import LiveBudgets, LiveFeature
from dsched.frontdoor.stats import FrontDoorStats

if TYPE_CHECKING:
    from dsched.cli.service import Service


class LiveProcess:
    """Implements `LiveEnvironment` over a running service."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.dsched_version = __version__
        self.instance_id = service.instance_id
        self.is_simulated = service.is_simulated

    def stats(self) -> FrontDoorStats:
        return self._service.front_door.stats

    def prices(self) -> tuple[float, float]:
        routing = self._service.config.routing
        return routing.request_cost_us * 1e3, routing.kv_token_cost_ns

    def budgets(self) -> LiveBudgets:
        config = self._service.config
        agents = self._service.reports.agents()
        names = sorted({name for agent in agents for name in (*agent.features, *agent.missing)})
        return LiveBudgets(
            step_budget_ms=config.scheduler.step_budget_ms,
            reprefill_tokens_per_rank=config.faults.reprefill_tokens_per_rank or None,
            num_agents=len(agents),
            num_agents_heard=sum(agent.is_heard for agent in agents),
            features=tuple(
                LiveFeature(
                    name=name,
                    num_with=sum(name in agent.features for agent in agents),
                    num_missing=sum(name in agent.missing for agent in agents),
                )
                for name in names
            ),
        )

    def conditions(self) -> tuple[bool, bool, bool]:
        member = self._service.member
        return (
            self._service.journal.status().is_durable,
            member.registration.status().is_registered,
            member.election.epoch_now() is not None,
        )

    def expert_loads(self) -> Iterable[tuple[str, ExpertLoad]]:
        for engine_id, driver in sorted(self._service.fleet.drivers.items()):
            if isinstance(driver, ExpertLoadSource):
                load = driver.expert_load()
                if load is not None:
                    yield engine_id, load


class Observers:
    """Lets several hear the controller, one after the other."""

    def __init__(self, *observers: ControllerObserver) -> None:
        self._observers = observers

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        for observer in self._observers:
            observer.on_handoff(method, gap)

    def on_membership_changed(self, view: MembershipView) -> None:
        for observer in self._observers:
            observer.on_membership_changed(view)
