"""Small tokenizers that are put together as those of well-known models are; all made in memory."""

from collections.abc import Callable, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "It's the quick brown fox; it jumps over 1234 lazy dogs, doesn't it? \n\n\t日本語 und Größe.",
    "def f(x):\n    return x ** 2  # <b>the</b> [x] {y: 'z'} <think> the quick </think>\n",
    "Every turn of a chat sends the whole conversation again: the system prompt, the tools.",
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text: str, *, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, lstrip=lstrip, rstrip=rstrip)


def plain(text: str) -> AddedToken:
    return AddedToken(text, special=False, normalized=False)


def _add(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> Tokenizer:
    for token in tokens:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def _byte_bpe(pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _byte_bpe(pre_tokenizers.Sequence([split, level]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    marks = [special(f"<|{name}|>") for name in ("endoftext", "im_start", "im_end")]
    others = [plain(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    return _add(tokenizer, [*marks, *others])


def llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _byte_bpe(pre_tokenizers.Sequence([split, level]))
    names = ("begin_of_text", "eot_id", "im_start", *(f"reserved_{n}" for n in range(30)))
    _add(tokenizer, [special(f"<|{name}|>") for name in names])
    bos = "<|begin_of_text|>"
    template = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    level_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([level_processor, template])
    return tokenizer


def deepseek() -> Tokenizer:
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    words = pre_tokenizers.Split(Regex(r"\s?\p{L}+|\s+(?!\S)|[^\s\p{L}]+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _byte_bpe(pre_tokenizers.Sequence([digits, words, level]))
    tokenizer.normalizer = normalizers.Sequence([])
    # As in their files: turns begin with tokens that are looked for in normalized text.
    turns = [AddedToken(text, normalized=True) for text in ("<｜User｜>", "<｜Assistant｜>")]
    marks = [special("<｜begin▁of▁sentence｜>"), special("<｜end▁of▁sentence｜>"), plain("<think>")]
    return _add(tokenizer, [*marks, *turns])


def roberta() -> Tokenizer:
    tokenizer = _byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    _add(tokenizer, [special("<s>"), special("</s>"), special("<mask>", lstrip=True)])
    ends = [(text, tokenizer.token_to_id(text)) for text in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends)
    return tokenizer


def _sentence_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=[special(each) for each in tokens[:3]]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    tokenizer.pre_tokenizer = None
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = _sentence_bpe()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    template = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.post_processor = template
    return _add(tokenizer, [special("[INST]"), special("[/INST]")])


def mistral_first() -> Tokenizer:
    tokenizer = _sentence_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _add(tokenizer, [special("[INST]"), special("[/INST]"), special("<|im_end|>")])


def phi3() -> Tokenizer:
    tokenizer = _sentence_bpe()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    names = ("user", "assistant", "im_end", "end")
    return _add(tokenizer, [special(f"<|{name}|>", rstrip=True) for name in names])


def gemma() -> Tokenizer:
    tokenizer = _sentence_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    spaces = [plain("\n" * count) for count in range(1, 9)] + [plain("▁▁"), plain("<b>")]
    return _add(tokenizer, [special("<start_of_turn>"), special("<end_of_turn>"), *spaces])


def _unigram(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokens = [special(each) for each in ("<pad>", "</s>", "<unk>", "<|im_end|>")]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, special_tokens=tokens, unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.post_processor = template
    return _add(tokenizer, [special("<mask>", lstrip=True)])


def t5() -> Tokenizer:
    return _unigram("always")


def unigram_first() -> Tokenizer:
    return _unigram("first")


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens = [special(f"[{name}]") for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
    trainer = trainers.WordPieceTrainer(vocab_size=200, show_progress=False, special_tokens=tokens)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


MODELS: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        bert,
        deepseek,
        gemma,
        llama2,
        llama3,
        mistral_first,
        phi3,
        qwen,
        roberta,
        t5,
        unigram_first,
    )
}
