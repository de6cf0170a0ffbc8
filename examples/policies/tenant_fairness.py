"""Share a full cluster among tenants by weight.

While there is room nobody is held back: weights only matter when requests wait.

- `priority`: those that wait go in the order of start-time fair queueing. Each tenant has a meter
  that rises by (tokens asked for) / weight with every request; the lower meter goes first. So a
  tenant of weight 3 gets three tokens for one of weight 1, whoever sends more. A tenant that was
  away starts where the busiest is, less `credit_tokens`: it cannot save up more than that.
- `admit`: when the cluster is full (`full_share` of the KV tokens, and `max_held` requests wait), a
  tenant that already has more than its weighted share of what is in work is refused with 429, so
  that the queue stays for the others.

Use one class for both; named twice with the same arguments, dsched makes one object of it.
"""

from collections import OrderedDict

from dsched.plugins import AdmissionAnswer, AdmissionView, RequestView

MAX_TENANTS = 1_000
"""Tenants remembered; clients choose the names. The one that was quiet for longest is forgotten."""


class TenantFairness:
    """Admission and priority by tenant, with weights."""

    name = "tenant-fairness"
    api_version = 1

    def __init__(
        self,
        *,
        weights: dict[str, float] | None = None,
        default_weight: float = 1.0,
        credit_tokens: int = 100_000,
        full_share: float = 0.9,
        max_held: int = 64,
    ) -> None:
        """`weights` by tenant, as clients name it in `X-Tenant-Id`; others get `default_weight`."""
        self.weights = dict(weights or {})
        wrong = [name for name, weight in self.weights.items() if not weight > 0]
        if wrong or not default_weight > 0:
            raise ValueError(f"weights of {wrong or 'others'} must be above 0")
        self.default_weight = default_weight
        self.credit_tokens = credit_tokens
        self.full_share = full_share
        self.max_held = max_held
        self._meters: OrderedDict[str, float] = OrderedDict()
        """Tokens over weight that each tenant has asked for; the latest to ask is last."""

    def priority(self, request: RequestView) -> int:
        """Minus the tenant's meter before this request: the lower one goes first."""
        weight = self._weight(request.tenant)
        floor = max(self._meters.values(), default=0.0) - self.credit_tokens
        start = max(self._meters.get(request.tenant, 0.0), floor)
        self._meters[request.tenant] = start + _tokens(request) / weight
        self._meters.move_to_end(request.tenant)
        if len(self._meters) > MAX_TENANTS:
            self._meters.popitem(last=False)
        return -round(start)

    def admit(self, request: RequestView, view: AdmissionView) -> AdmissionAnswer | None:
        """Refuse whoever has more than its share of a full cluster."""
        is_full = view.load_share >= self.full_share and view.num_held >= self.max_held
        if not is_full or view.tenant_share <= self._share(request.tenant):
            return None
        return AdmissionAnswer.REFUSE

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, self.default_weight)

    def _share(self, tenant: str) -> float:
        """The tenant's weight over the weights of all that are known; 1 when it is alone."""
        known = {*self._meters, tenant}
        return self._weight(tenant) / sum(sorted(self._weight(each) for each in known))


def _tokens(request: RequestView) -> int:
    return request.num_prompt_tokens + request.max_output_tokens
