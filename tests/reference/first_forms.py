"""What dsched processes write for each other, in the least that the first version has.

A reader of today takes each of them (tests/property/test_neighbouring_versions_properties.py). A
class that is added gets its first form here, with the fields it has at that time and no default;
a form that is here is never changed: a field that is added later has a default instead.
"""

from typing import Any

FIRST_FORMS: dict[str, Any] = {
    "RankRow": {
        "dp_rank": 0,
        "state": "up",
        "num_running": 0,
        "num_waiting": 0,
        "num_kv_tokens": 0,
        "kv_capacity_tokens": None,
        "step_ns": 0,
        "report_age_ns": None,
    },
    "EngineRow": {"engine_id": "e", "pool": "p", "kind": "vllm", "model": "m", "state": "up"},
    "InstanceRow": {
        "instance_id": "i",
        "version": "0.1.0",
        "front_door_url": "http://f",
        "admin_url": "http://a",
        "started_s": 1,
    },
    "LeaderRow": {"instance_id": "i"},
    "WorkersView": {},
    "WorkersAnswer": {"workers": {}},
    "RankNews": ["e", 0, 1, 2],
    "PoolNews": {"pool": "p", "longest_tokens": 2, "ranks": []},
    "WorkerNews": ["e", 0, 3, 2, 1],
    "PrefillNews": {"pool": "p", "workers": []},
    "PeerNews": {"peer_version": 1, "instance_id": "i", "seq": 1, "is_full": True, "pools": []},
    "AgentHello": {
        "type": "hello",
        "dsched_version": "0.1.0",
        "engine_id": "e",
        "incarnation": "00",
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "m",
        "max_model_len": 100,
        "dp_rank": 0,
        "num_dp_ranks": 1,
        "kv_capacity_tokens": 1_000,
        "max_running_requests": 8,
    },
    "RankReport": {
        "type": "report",
        "engine_id": "e",
        "incarnation": "00",
        "dp_rank": 0,
        "seq": 1,
        "step": 1,
        "num_running": 0,
        "num_waiting": 0,
        "num_kv_tokens": 0,
        "num_waiting_prefill_tokens": 0,
        "kv_capacity_tokens": 1_000,
        "step_ns": 0,
    },
    "AgentGoodbye": {"type": "goodbye", "engine_id": "e", "incarnation": "00", "dp_rank": 0},
    "ExpertLoadReport": {
        "type": "expert_load",
        "engine_id": "e",
        "num_layers": 1,
        "num_experts": 2,
        "largest": [3],
        "shares": b"",
    },
    "SetStepBudget": {"type": "set_step_budget", "epoch": 1, "step_budget_ns": None},
    "PlaceExperts": {
        "type": "place_experts",
        "epoch": 1,
        "leader_epoch": 1,
        "slot_expert": [[0, -1]],
    },
    "AbortAttempts": {"type": "abort", "epoch": 1, "attempt_ids": []},
    "SayHello": {"type": "say_hello"},
}
