"""A drafter that knows the answer and makes mistakes with known probabilities.

Loaded by vLLM in the engine's process as `verify_proposer.OracleProposer`
(`method="custom_class"`). The answers of an earlier run are in the file named by `ORACLE_ANSWERS`.
"""

import json
import os
from pathlib import Path

import numpy as np

INSTANCES: list["OracleProposer"] = []
WRONG_TOKEN_SHIFT = 7


class OracleProposer:
    """Drafts the known continuation; each token is wrong with 1 - its confidence."""

    def __init__(self, vllm_config: object) -> None:
        self.num_positions = vllm_config.speculative_config.num_speculative_tokens
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        answers = json.loads(Path(os.environ["ORACLE_ANSWERS"]).read_text())
        self.sequences = [each["prompt"] + each["output"] for each in answers]
        self.prompts = [each["prompt"] for each in answers]
        self.rng = np.random.default_rng(11)
        self.confidence = np.zeros((0, self.num_positions))
        INSTANCES.append(self)

    def load_model(self, *args: object, **kwargs: object) -> None:
        pass

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        rows, drafts = [], []
        for index, sampled in enumerate(sampled_token_ids):
            # Some requests are easy and some are hard, and it changes from token to token.
            ease = 0.35 + 0.6 * (index % 4) / 3
            row = np.clip(ease + self.rng.normal(0.0, 0.15, self.num_positions), 0.05, 0.99)
            rows.append(row)
            draft: list[int] = []
            if sampled:
                length = int(num_tokens_no_spec[index])
                draft = self.continue_from(token_ids_cpu[index, :length].tolist(), row)
            drafts.append(draft)
        self.confidence = np.array(rows).reshape(-1, self.num_positions)
        return drafts

    def continue_from(self, context: list[int], row: np.ndarray) -> list[int]:
        for prompt, sequence in zip(self.prompts, self.sequences, strict=True):
            if context[: len(prompt)] == prompt:
                truth = sequence[len(context) : len(context) + self.num_positions]
                is_wrong = self.rng.random(len(truth)) >= row[: len(truth)]
                return [
                    (token + WRONG_TOKEN_SHIFT) % self.vocab_size if wrong else token
                    for token, wrong in zip(truth, is_wrong, strict=True)
                ]
        return []
