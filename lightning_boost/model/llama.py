"""A LLaMA decoder with low-rank linears, under Hugging Face's parameter names."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.model.attention import Attention
from lightning_boost.model.cache import KeyValueCache, LayerCache, causal_mask
from lightning_boost.model.crossing import Crossing, Latents, LayerLatents, call
from lightning_boost.model.documents import document_lengths, document_mask, document_positions, number_documents
from lightning_boost.model.initialization import Value, initialize
from lightning_boost.model.loss import NextTokenLoss
from lightning_boost.model.mlp import MLP
from lightning_boost.model.norm import RMSNorm
from lightning_boost.model.rotary import rotary_tables


class _Block(nn.Module):
    """One pre-norm block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, layer)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def _run(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: LayerCache | None,
        latents: LayerLatents | None = None,
    ) -> Tensor:
        normalized = call(self.input_layernorm, hidden, latents)
        hidden = hidden + self.dropout(self.self_attn(normalized, rotary, mask, cache, latents))
        normalized = call(self.post_attention_layernorm, hidden, latents)
        output: Tensor = hidden + self.dropout(self.mlp(normalized, latents))
        return output


class DecoderLayer(_Block):
    """A block whose latents do not cross."""

    @override
    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``; ``rotary``, ``mask`` and ``cache`` as in ``Attention``."""
        return self._run(hidden, rotary, mask, cache)


class CrossingDecoderLayer(_Block):
    """A block that receives the latents of the block before and gives its own on to the next."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.crossing_sizes = config.crossing_sizes(layer)
        """Of each projection that receives a latent the width of it, and of its own."""
        gate = config.low_rank.crossing_gate
        self.crossings = nn.ModuleDict(
            {name: Crossing(before, here, gate) for name, (before, here) in self.crossing_sizes.items()}
        )

    @override
    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        latents: Latents | None = None,
    ) -> tuple[Tensor, Latents]:
        """Map ``[B, T, D]`` and latents ``[B, T, R]`` to the same of the next block.

        Other arguments are as in ``Attention``; with a cache, latents are those of the new tokens, as ``hidden`` is.
        """
        own = LayerLatents(self.crossings, latents or {})
        return self._run(hidden, rotary, mask, cache, own), own.given


def make_layer(config: LlamaConfig, layer: int) -> DecoderLayer | CrossingDecoderLayer:
    """Return a layer of a model of either kind."""
    make = CrossingDecoderLayer if config.low_rank.kind == "lax" else DecoderLayer
    return make(config, layer)


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.has_crossing = config.low_rank.kind == "lax"
        self.layers = nn.ModuleList(make_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @override
    def forward(
        self, input_ids: Tensor, document_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Map token ids ``[B, T]`` to the last hidden state ``[B, T, D]``; arguments as in the whole model."""
        hidden = self.embed_tokens(input_ids)
        rotary, mask = self._places(input_ids, document_ids, 0 if cache is None else cache.num_tokens, like=hidden)
        latents: Latents = {}
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            if self.has_crossing:
                hidden, latents = layer(hidden, rotary, mask, layer_cache, latents=latents)
            else:
                hidden = layer(hidden, rotary, mask, layer_cache)
        normalized: Tensor = self.norm(hidden)
        return normalized

    def _places(
        self, input_ids: Tensor, document_ids: Tensor | None, num_seen: int, like: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return the rotary tables of the tokens' positions, and which tokens each one sees."""
        if document_ids is None:
            num_tokens, device = input_ids.shape[-1], input_ids.device
            positions = torch.arange(num_seen, num_seen + num_tokens, device=device)
            rotary = rotary_tables(positions, num_seen + num_tokens, self.config, like=like)
            return rotary, causal_mask(num_seen, num_tokens, device)
        numbers = number_documents(document_ids)
        rotary = rotary_tables(document_positions(numbers), document_lengths(numbers), self.config, like=like)
        return rotary, document_mask(numbers)


class LlamaForCausalLM(nn.Module):
    """The decoder with its head.

    Built on the meta device it holds no values; otherwise every parameter is filled as ``initialize`` tells.

    Args:
        config: Sizes and kind.
        values: What its parameters start from, by their names; ``None`` draws them.
    """

    def __init__(self, config: LlamaConfig, values: Mapping[str, Value] | None = None) -> None:
        super().__init__()
        self.config = config
        self.given_values = values
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = NextTokenLoss(label_smoothing=config.label_smoothing)
        if not self.lm_head.weight.is_meta:
            initialize(self, std=config.initializer_range)

    @override
    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return logits ``[B, T, V]``, or with labels the mean loss over valid next tokens.

        Args:
            input_ids: ``[B, T]``.
            labels: ``[B, T]``, aligned with ``input_ids`` as in Hugging Face: the model shifts them, and ignores
                ``-100``.
            document_ids: ``[B, T]``, which document of its sequence each token belongs to; another begins wherever it
                changes. No token sees another document, and positions begin anew in each. ``None``: a sequence is one
                document.
            cache: Of the tokens before these, which is extended; there are no documents then.
        """
        hidden = self.model(input_ids, document_ids, cache)
        output: Tensor = self.lm_head(hidden) if labels is None else self.loss(hidden, self.lm_head.weight, labels)
        return output


def find_llama(module: nn.Module) -> LlamaForCausalLM | None:
    """Return the model of this package that a module has; ``None`` if it has none, or several."""
    found = [inner for inner in module.modules() if isinstance(inner, LlamaForCausalLM)]
    return found[0] if len(found) == 1 else None
