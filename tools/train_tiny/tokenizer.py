"""The tokenizer of the shipped model: byte-level BPE, digits apart, the control tokens of DeepSeek-V4's chat format last."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lamina.models.tiny import BOS, CONTROL, EOS, PAD

VOCAB = 2816


def train_tokenizer(texts: Iterable[str], vocab: int = VOCAB) -> Tokenizer:
    """A tokenizer of exactly `vocab` tokens. Ids: BOS 0, EOS 1, PAD 2, the 256 bytes, merges, the control tokens last.

    Raises ValueError if the texts are too short for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL),
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in CONTROL])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab}: more text is needed")
    return tokenizer
