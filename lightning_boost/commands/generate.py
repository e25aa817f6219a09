"""``generate``: text from a model in files, on one process or several that share its layers."""

import contextlib
import json as json_format
import logging
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.data.tokenizers import Tokenizer, load_tokenizer
from lightning_boost.language_model import LowRankLanguageModel
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.generation import Sampling, generate
from lightning_boost.strategy.boost import BoostParallelStrategy

_TOKENIZER_FILE = "tokenizer.json"
_UNFINISHED = "�"
"""How a decoder shows the first bytes of a character whose others are still to come."""


def generate_text(
    src: str,
    *,
    prompt: str,
    num_tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | None = None,
    tensor_parallel_size: int = 1,
    precision: Literal["32-true", "bf16-true"] = "32-true",
    json: bool = False,
) -> int:
    """Continue a prompt, token by token, until the model ends its document or there are enough.

    SRC is a model of any format that convert reads. Keys and values are kept: each token is run once.

    Args:
        src: Directory or file of the model.
        prompt: Text to continue.
        num_tokens: How many tokens to add at most.
        temperature: What logits are divided by before a token is drawn; 0 takes the most likely one.
        top_p: Draw from the most likely tokens that have this share of the probability together.
        seed: Of the draws.
        tokenizer: A tokenizer.json, or bytes; none: the tokenizer.json beside SRC.
        tensor_parallel_size: Processes that share each layer; all are started on this machine.
        precision: Lightning's name.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens ({num_tokens}) must be at least 1.")
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    vocabulary = _tokenizer_of(tokenizer, Path(src))
    prompt_ids = vocabulary.encode(prompt)
    module = _Writer(src, vocabulary, sampling, num_tokens, stream=sys.stderr if json else sys.stdout)
    _check_prompt(prompt_ids, module.config)
    for name in ("lightning.pytorch", "lightning.fabric"):
        # what a Trainer says of itself would stand in the text
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = Trainer(
        strategy=BoostParallelStrategy(tensor_parallel_size),
        devices=tensor_parallel_size,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.redirect_stdout(sys.stderr):
        trainer.predict(module, DataLoader(_Prompt(prompt_ids)), return_predictions=False)
    if json and trainer.is_global_zero:
        result = {
            "prompt": prompt,
            "text": module.text,
            "num_tokens": module.num_generated,
            "tokens_per_second": module.num_generated / module.seconds,
        }
        print(json_format.dumps(result))
    return 0


def _tokenizer_of(given: str | None, src: Path) -> Tokenizer:
    beside = (src if src.is_dir() else src.parent) / _TOKENIZER_FILE
    if given is None and not beside.is_file():
        raise ValueError(f"tokenizer must be given: there is no {beside}. It may be 'bytes'.")
    return load_tokenizer(given or str(beside))


def _check_prompt(prompt_ids: list[int], config: LlamaConfig) -> None:
    if not prompt_ids:
        raise ValueError("prompt must hold at least one token.")
    if max(prompt_ids) >= config.vocab_size:
        raise ValueError(
            f"prompt holds token {max(prompt_ids)}, and the model's vocab_size is {config.vocab_size}: give the model's"
            " own tokenizer."
        )


class _Prompt(Dataset[Tensor]):
    """One sequence."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = torch.tensor(token_ids)

    def __len__(self) -> int:
        return 1

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self._token_ids


class _Writer(LowRankLanguageModel):
    """Writes what follows a prompt, as it comes."""

    def __init__(self, src: str, vocabulary: Tokenizer, sampling: Sampling, num_tokens: int, stream: Any) -> None:
        super().__init__(checkpoint=src)
        self.vocabulary, self.sampling, self.num_tokens, self.stream = vocabulary, sampling, num_tokens, stream
        self.text, self.num_generated, self.seconds = "", 0, 0.0

    @override
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Continue the prompt ``[1, T]``; return the tokens that follow."""
        started = time.perf_counter()
        self._prompt_ids: list[int] = batch[0].tolist()
        token_ids: list[int] = []
        cache = KeyValueCache(self.config.num_hidden_layers)
        for token in generate(self.model, batch, self.num_tokens, sampling=self.sampling, cache=cache):
            token_ids.append(int(token))
            if token_ids[-1] == self.vocabulary.end_of_document:
                break
            self._write(token_ids)
        self._write(token_ids, is_end=True)
        self.num_generated, self.seconds = len(token_ids), time.perf_counter() - started
        return torch.tensor(token_ids)

    def _write(self, token_ids: list[int], *, is_end: bool = False) -> None:
        """Show what is new of the text, in process 0; a character only when it is whole."""
        # together: some vocabularies drop the space before the first word that they are given
        whole = self.vocabulary.decode(self._prompt_ids + token_ids)
        text = whole[len(self.vocabulary.decode(self._prompt_ids)) :]
        if not is_end and text.endswith(_UNFINISHED):
            return
        if self.trainer.is_global_zero:
            self.stream.write(text[len(self.text) :] + ("\n" if is_end else ""))
            self.stream.flush()
        self.text = text
