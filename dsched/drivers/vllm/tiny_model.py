"""A tiny random Qwen3-MoE with its own tokenizer, for trying dsched and for tests.

    python -m dsched.drivers.vllm.tiny_model FOLDER

runs with the Python of an engine's environment (torch, transformers). One seed gives one model, on
any machine with the same torch. Nothing is downloaded. The answers are gibberish, but they depend
on the whole context, so a lost, repeated or misrouted token changes everything after it.

The tokenizer is byte-level BPE over 512 tokens: every sequence of tokens is some text, and
characters outside ASCII often span several tokens, as with real models.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

VOCAB_SIZE: Final = 512
SPECIAL_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
MAX_MODEL_LEN: Final = 4_096
WEIGHT_STD: Final = 0.3
"""With hidden size 64 this gives logits a spread of about 2.4, so that the best token leads the
second by far more than rounding can move it (median 0.5 in float32)."""
STAMP: Final = "dsched_tiny_model.json"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS: Final = (
    "The router sends each request to the rank that will answer it first, and the rank computes ",
    "one step after another: a chunk of the prompt, then a token, then another token. Experts ",
    "are spread over many devices, and every step waits for the slowest of them. A good ",
    "scheduler keeps the load even, the queue short and the cache warm; a bad one lets a single ",
    "long prompt stand in everybody's way. When a device fails, its requests continue elsewhere ",
    "without a missing or repeated word. ",
    "Größe, Übermaß, Straße und Käse; déjà vu, façade, naïve, œuvre; mañana, señor, corazón. ",
    "路由器把请求发送到最空闲的节点,专家分布在许多设备上,每一步都要等待最慢的一个。",
    "推論サーバーは要求を分散し、専門家は多くの装置に置かれます。",
    "Запрос идёт туда, где его скорее обслужат; эксперты распределены по устройствам. ",
    "🚀 ✨ 🙂 👍🏽 👩‍💻 ⏱️ 🧠 🎯 – “quoted” … 1 + 1 = 2; x_i ≤ y_j; 42 % of 1,000.00 € ",
    "def step(self, budget: int) -> list[int]:\n    return [chunk for chunk in self.queue]\n",
    '{"model": "tiny", "stream": true, "max_tokens": 64, "prompt": [1, 2, 3]}\n',
)


def make_tokenizer(folder: Path) -> None:
    """Train the tokenizer on `CORPUS` and save it with the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens were learnt, not {VOCAB_SIZE}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path, *, seed: int) -> int:
    """Save the model with random float32 weights; return its number of parameters."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = Qwen3MoeForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(0.0, WEIGHT_STD, generator=generator)
        # Special tokens are never the likeliest: an answer has the length that was asked for.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def recipe_digest(seed: int) -> str:
    """Name what the model is made from: this file and the seed."""
    return hashlib.sha256(Path(__file__).read_bytes() + str(seed).encode()).hexdigest()[:16]


def read_recipe(folder: Path) -> object:
    """Return what the model in `folder` was made from; `None` if there is none of ours."""
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def make_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Make model and tokenizer in `folder`, unless they are there from the same recipe.

    They are made beside it and moved in whole, so that nobody sees half of them.
    """
    recipe = {"recipe": recipe_digest(seed), "seed": seed}
    if read_recipe(folder) == recipe:
        return
    # No pictures here, and a torchvision that does not fit its torch breaks transformers' import.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=folder.parent) as name:
        scratch = Path(name) / "model"
        scratch.mkdir()
        make_tokenizer(scratch)
        num_parameters = make_model(scratch, seed=seed)
        (scratch / STAMP).write_text(json.dumps(recipe))
        if folder.exists():
            folder.rename(Path(name) / "old")
        scratch.rename(folder)
    sys.stdout.write(f"{folder}: {num_parameters:,} random parameters\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_model(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
