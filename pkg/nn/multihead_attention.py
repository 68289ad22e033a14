"""``MultiheadAttention``: PyTorch's module over the operators of :mod:`pkg.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._arguments import check_instance, check_tensor
from ..ops.linear import linear
from ..ops.matmul import matmul
from ..ops.scaled_dot_product_attention import scaled_dot_product_attention
from ._parameters import refuse_computed, refuse_lazy
from ._tracing import is_traced, node_or_refusal

if TYPE_CHECKING:
    from typing_extensions import Self

_PROJECTIONS = (
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v"),
)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` by :func:`pkg.ops.linear` and our attention.

    The constructor, parameters and state are that class's, so each loads what the other saved.
    Without ``need_weights`` the matrix of scores is never held, in training neither, whatever the
    masks are; queries, keys and values are read where the projection wrote them.

    What differs: a query all of whose keys are hidden gets zeros where no weights are asked for
    (PyTorch gives NaN on some of its ways), masks of different kinds may be given together, and
    added keys are seen under ``is_causal`` too (PyTorch hides them where it takes that hint).
    Nested tensors go PyTorch's way. ``torch.nn.TransformerEncoderLayer`` calls neither module in
    inference where its own fast path serves: ``torch.backends.mha.set_fastpath_enabled(False)``.

    Args:
        embed_dim: Elements of a query, ``num_heads`` times those of a head.
        num_heads: How many heads there are.
        dropout: Probability with which a weight is dropped in training.
        bias: Whether the projections have one.
        add_bias_kv: Whether a learnt key and value are added behind those of every sequence.
        add_zero_attn: Whether a key and value of zeros are.
        kdim: Elements of a key; ``embed_dim`` by default.
        vdim: Elements of a value; ``embed_dim`` by default.
        batch_first: Whether tensors are (batch, tokens, elements), not (tokens, batch, elements).
        device: Of the parameters.
        dtype: Of the parameters; floating.

    Example:
        >>> layer = MultiheadAttention(16, 4, batch_first=True)
        >>> tokens = torch.ones(2, 5, 16)
        >>> output, weights = layer(tokens, tokens, tokens)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    @classmethod
    def from_multihead_attention(cls, module: torch.nn.MultiheadAttention) -> Self:
        """A module that shares the parameters of a :class:`torch.nn.MultiheadAttention`.

        Args:
            module: Is not changed.

        Raises:
            TypeError: ``module`` is no :class:`torch.nn.MultiheadAttention`.
            ValueError: It has a lazy layer that was not called yet, or a parametrization or a hook
                computes a parameter of it.

        Example:
            >>> module = torch.nn.MultiheadAttention(16, 4)
            >>> MultiheadAttention.from_multihead_attention(module).out_proj is module.out_proj
            True
        """
        name = "MultiheadAttention.from_multihead_attention"
        theirs = torch.nn.MultiheadAttention
        check_instance(name, "module", module, theirs, "a torch.nn.MultiheadAttention")
        refuse_lazy(name, module)
        refuse_computed(name, module, _PROJECTIONS)
        new = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            device="meta",  # no memory for parameters that are replaced at once
        )
        for projection in _PROJECTIONS:
            setattr(new, projection, getattr(module, projection))
        new.out_proj = module.out_proj
        return new.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Projects, attends, and projects again.

        Args:
            query: Shape (B, L, embed_dim) with ``batch_first``, else (L, B, embed_dim); or
                (L, embed_dim) without a batch.
            key: Shape (B, S, kdim) or as ``query`` has it.
            value: Shape (B, S, vdim), likewise.
            key_padding_mask: Shape (B, S), or (S,) without a batch: boolean, True where a key is
                hidden, or numbers to add to its scores.
            need_weights: Whether the weights are wanted: they take memory and time.
            attn_mask: Shape (L, S) or (B num_heads, L, S): boolean, True where hidden, or numbers
                to add.
            average_attn_weights: Whether the weights are the mean over the heads.
            is_causal: Says that ``attn_mask``, which must be given, is the causal one: then it is
                not read where there are no other masks, no weights are wanted and no keys added.

        Returns:
            The output, laid out as ``query``, and None or the weights: (B, L, S), or without
            ``average_attn_weights`` (B, num_heads, L, S), in either case without B where there is
            no batch. S counts added keys too.

        Raises:
            RuntimeError: Shapes do not fit, a mask is neither boolean nor floating, or
                ``is_causal`` is given without ``attn_mask``; and what the operators raise.
            TypeError: ``query``, ``key`` or ``value`` is no tensor.
        """
        must_be = "a tensor of two or three dimensions"
        if is_traced(query, key, value):
            options = {
                "key_padding_mask": key_padding_mask,
                "need_weights": need_weights,
                "attn_mask": attn_mask,
                "average_attn_weights": average_attn_weights,
                "is_causal": is_causal,
            }
            node: tuple[Tensor, Tensor | None] = node_or_refusal(
                self, "MultiheadAttention", "query", must_be, (query, key, value), options
            )
            return node
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor("MultiheadAttention", name, tensor, must_be)
        if query.is_nested or key.is_nested or value.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights
            )
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        _check_dtypes_of_masks(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        has_batch = query.dim() == 3
        # To (batch, tokens, elements), views alone; one tensor stays one.
        views: dict[int, Tensor] = {}
        for tensor in (query, key, value):
            if not has_batch:
                views[id(tensor)] = tensor.unsqueeze(0)
            else:
                views[id(tensor)] = tensor if self.batch_first else tensor.transpose(0, 1)
        heads = self._project(views[id(query)], views[id(key)], views[id(value)])
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in heads)
        adds_keys = self.bias_k is not None or self.add_zero_attn  # which causality would hide
        causal = is_causal and key_padding_mask is None and not (need_weights or adds_keys)
        mask = None if causal else self._mask(q, k, key_padding_mask, attn_mask)
        k, v, mask = self._with_added_keys(k, v, mask)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            output, weights = _attend_with_weights(q, k, v, mask, dropout_p)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if has_batch else weights.squeeze(0)
        else:
            output = scaled_dot_product_attention(q, k, v, mask, dropout_p, causal)
        joined = output.transpose(1, 2).flatten(2)
        if not has_batch:
            joined = joined.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1)
        return linear(joined, self.out_proj.weight, self.out_proj.bias), weights

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        given: dict[str, tuple[Any, Any]] = {
            "dropout": (self.dropout, 0.0),
            "bias": (self.in_proj_bias is not None, True),
            "add_bias_kv": (self.bias_k is not None, False),
            "add_zero_attn": (self.add_zero_attn, False),
            "kdim": (self.kdim, self.embed_dim),
            "vdim": (self.vdim, self.embed_dim),
            "batch_first": (self.batch_first, False),
        }
        changed = (f", {name}={value}" for name, (value, usual) in given.items() if value != usual)
        return text + "".join(changed)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        rank = query.dim()
        if rank not in (2, 3) or key.dim() != rank or value.dim() != rank:
            raise RuntimeError(
                f"MultiheadAttention: query, key and value have {rank}, {key.dim()} and "
                f"{value.dim()} dimensions; they must all have three, or two without a batch"
            )
        sizes = (("query", query, self.embed_dim), ("key", key, self.kdim))
        for name, tensor, size in (*sizes, ("value", value, self.vdim)):
            if tensor.shape[-1] != size:
                raise RuntimeError(
                    f"MultiheadAttention: {name} has {tensor.shape[-1]} elements in its last "
                    f"dimension; it must have {size}"
                )
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (
            rank == 3 and query.shape[batch] != key.shape[batch]
        ):
            raise RuntimeError(
                f"MultiheadAttention: query, key and value are of shapes {list(query.shape)}, "
                f"{list(key.shape)} and {list(value.shape)}; batches, and tokens of key and value, "
                "must be equal"
            )
        if rank == 3 and padding is not None and padding.dim() != 2:
            raise RuntimeError(
                f"MultiheadAttention: key_padding_mask is of shape {list(padding.shape)} where "
                f"query has a batch; it must be {[key.shape[batch], key.shape[1 - batch]]}, those "
                "of key"
            )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "MultiheadAttention: is_causal is given without attn_mask; it says that this is "
                "the causal mask, torch.nn.Transformer.generate_square_subsequent_mask(L)"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, heads side by side; one product where the inputs are one."""
        weight, bias, size = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is None:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            inputs = (query, key, value)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return tuple(map(linear, inputs, weights, biases))
        if query is key and key is value:
            return linear(query, weight, bias).chunk(3, -1)
        first, rest = weight.split((size, 2 * size))
        of_first, of_rest = (None, None) if bias is None else bias.split((size, 2 * size))
        queries = linear(query, first, of_first)
        if key is value:
            return (queries, *linear(key, rest, of_rest).chunk(2, -1))
        of_keys, of_values = (None, None) if of_rest is None else of_rest.chunk(2)
        keys, values = rest.chunk(2)
        return queries, linear(key, keys, of_keys), linear(value, values, of_values)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as one that broadcasts to the scores: True where a key is seen, or numbers."""
        batch, heads, rows, columns = *q.shape[:3], k.shape[2]
        masks = []
        if padding is not None:
            if padding.shape not in ((batch, columns), (columns,)):
                raise RuntimeError(
                    f"MultiheadAttention: key_padding_mask is of shape {list(padding.shape)}; it "
                    f"must be {[batch, columns]}, those of key"
                )
            masks.append(padding.reshape(batch, 1, 1, columns))
        if attn_mask is not None:
            if attn_mask.shape == (rows, columns):
                masks.append(attn_mask)
            elif attn_mask.shape == (batch * heads, rows, columns):
                masks.append(attn_mask.unflatten(0, (batch, heads)))
            else:
                raise RuntimeError(
                    f"MultiheadAttention: attn_mask is of shape {list(attn_mask.shape)}; it must "
                    f"be {[rows, columns]} or {[batch * heads, rows, columns]}"
                )
        if all(mask.dtype == torch.bool for mask in masks):
            hidden = [~mask for mask in masks]
            return (hidden[0] & hidden[1]) if len(hidden) == 2 else hidden[0] if hidden else None
        numbers = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            if mask.dtype == torch.bool
            else mask.to(q.dtype)
            for mask in masks
        ]
        return numbers[0] + numbers[1] if len(numbers) == 2 else numbers[0]

    def _with_added_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The learnt key and that of zeros behind the others, which no mask hides."""
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            biases = (
                each.to(k.dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for each in (self.bias_k, self.bias_v)
            )
            k, v = (
                torch.cat((each, bias.expand(each.shape[0], -1, -1, -1)), 2)
                for each, bias in zip((k, v), biases, strict=True)
            )
            added += 1
        if self.add_zero_attn:
            k, v = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (k, v))
            added += 1
        if mask is not None and added:
            fill = 1.0 if mask.dtype == torch.bool else 0.0
            mask = torch.nn.functional.pad(mask, (0, added), value=fill)
        return k, v, mask


def _check_dtypes_of_masks(**masks: Tensor | None) -> None:
    """Integers could be meant either way."""
    for name, mask in masks.items():
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise RuntimeError(
                f"MultiheadAttention: {name} is {mask.dtype}; it must be boolean, True where a key "
                "is hidden, or floating, numbers to add to the scores; convert it by .bool() or "
                ".float()"
            )


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """The output and the weights, which have a gradient too; by the definition, O(L S)."""
    scores = matmul(q * max(q.shape[-1], 1) ** -0.5, k.mT)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.nn.functional.dropout(torch.softmax(scores, -1), dropout_p)
    return matmul(weights, v), weights
