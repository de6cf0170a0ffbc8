"""Which models the cluster serves, as the front door asks for every request."""

from collections.abc import Mapping

from dsched.controller.request import ModelInfo
from dsched.controller.state import ControllerState


class ModelCatalog:
    """Every configured model; worked out anew only when the membership has changed."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._models: dict[str, ModelInfo] = {}
        self._epoch: int | None = None

    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model by name, also those without a live engine."""
        epoch = self._state.membership.epoch
        if self._epoch != epoch:
            self._epoch = epoch
            self._models = {
                model: self._model_info(pool) for model, pool in self._state.pool_of_model.items()
            }
        return self._models

    def not_ready_reason(self) -> str | None:
        """`None` while at least one pool can serve."""
        state = self._state
        if state.is_closed:
            return "dsched is stopping"
        if not state.pools:
            return "no pool is configured"
        reasons = []
        for pool in sorted(state.pool_of_model.values()):
            if state.can_serve(pool):
                return None
            reasons.append(f"pool {pool!r} has no engine up")
        return "; ".join(reasons)

    def _model_info(self, pool_name: str) -> ModelInfo:
        membership = self._state.membership
        pool = membership.pools[pool_name]
        known = [
            record.description
            for record in membership.engines.values()
            if record.pool == pool_name
            and record.description is not None
            and record.description.model == record.spec.model
        ]
        limits = [description.max_model_len for description in known]
        if pool.max_model_len is not None:
            limits.append(pool.max_model_len)
        sizes = [each.vocab_size for each in known if each.vocab_size is not None]
        return ModelInfo(
            name=pool.model,
            max_model_len=min(limits) if limits else None,
            vocab_size=min(sizes) if sizes else None,
            is_available=self._state.can_serve(pool_name),
            capabilities=membership.capabilities(pool_name),
        )
