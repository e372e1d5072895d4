"""What a weight table says, and the one piece of arithmetic that import and export both follow.

A table row names a Megatron parameter, the Hugging Face tensors it is made of, how they are fused and how it is
sharded. From it follow the :class:`Piece` s of one rank's shard: slabs that are equal to slabs of Hugging Face
tensors. Import copies pieces in, export copies the same pieces out, so the two cannot disagree.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class Shard(enum.Enum):
    """Over which group a parameter is cut, and along which dimension."""

    REPLICATED = (None, False)
    COLUMN = (0, False)  # output features over TP
    ROW = (1, False)  # input features over TP
    EXPERT_COLUMN = (0, True)  # whole experts over EP, output features of each over ETP
    EXPERT_ROW = (1, True)  # whole experts over EP, input features of each over ETP

    @property
    def dim(self) -> int:
        """The dimension that is cut (0 where nothing is)."""
        return self.value[0] or 0

    @property
    def is_cut(self) -> bool:
        """Whether each rank of the (expert) tensor-parallel group holds a part of its own."""
        return self.value[0] is not None

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to one routed expert."""
        return self.value[1]


class Fuse(enum.Enum):
    """How several Hugging Face tensors share one Megatron parameter, along its sharded dimension."""

    NONE = "one tensor"
    QKV = "query heads, key head, value head of one query group; then the next group"
    GATE_UP = "the gate's part of this rank, then the up projection's"
    PAD_VOCAB = "the vocabulary, then zero rows up to the padded size"


class Where(enum.Enum):
    """Which part of the model has the row's parameter."""

    INPUT = "before the layers, on the first pipeline stage"
    OUTPUT = "after the layers, on the last pipeline stage"
    EVERY_LAYER = "every layer"
    DENSE_LAYER = "layers with a plain MLP"
    MOE_LAYER = "layers with experts"


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor: its name with ``{layer}`` and ``{expert}``, its shape as names of :class:`Dimensions`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of a table. ``megatron`` lists alternatives: the local layers' name, then Transformer Engine's."""

    megatron: tuple[str, ...]
    hf: tuple[HfTensor, ...]
    shard: Shard
    where: Where
    fuse: Fuse = Fuse.NONE
    exported: bool = True  # False for a second copy of a tensor that another row exports


@dataclass(frozen=True)
class Family:
    """The table of one model family, keyed by the ``model_type`` of its config.json."""

    model_type: str
    architecture: str
    rows: tuple[Row, ...]
    arguments: Mapping[str, object] = field(default_factory=dict)  # Megatron arguments that the family fixes
    has_experts: bool = False
    ignored: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)  # regular expressions
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors that files may hold again under a second name


@dataclass(frozen=True)
class Dimensions:
    """The sizes that shapes and fusions refer to, and which layers have experts."""

    sizes: Mapping[str, int]
    query_groups: int
    moe_layers: tuple[bool, ...]

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, object]) -> "Dimensions":
        """From the values that ``megatron_arguments_from_hf`` gives."""

        def number(name: str) -> int:
            value = arguments.get(name)
            return value if isinstance(value, int) else 0

        head_dim, layers = number("kv_channels"), number("num_layers")
        sizes = {
            "vocab": number("vocab_size"),
            "hidden": number("hidden_size"),
            "head_dim": head_dim,
            "query": number("num_attention_heads") * head_dim,
            "key": number("num_query_groups") * head_dim,
            "ffn": number("ffn_hidden_size"),
            "expert_ffn": number("moe_ffn_hidden_size"),
            "experts": number("num_experts"),
        }
        pattern = arguments.get("moe_layer_freq")
        moe = tuple(bool(flag) for flag in pattern) if isinstance(pattern, list) else (bool(sizes["experts"]),) * layers
        return cls(sizes, number("num_query_groups"), moe)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return self.sizes["experts"]

    def shape(self, tensor: HfTensor) -> tuple[int, ...]:
        """The shape of a Hugging Face tensor."""
        return tuple(self.sizes[name] for name in tensor.shape)


@dataclass(frozen=True)
class Unit:
    """A row at one place of the model: the thing that is imported and exported as a whole."""

    row: Row
    layer: int | None = None  # counted over the whole model
    expert: int | None = None  # counted over all experts of the layer

    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face names of this unit's tensors."""
        return tuple(tensor.name.format(layer=self.layer, expert=self.expert) for tensor in self.row.hf)


def units(family: Family, dims: Dimensions) -> Iterator[Unit]:
    """Every unit of the model, the same on all ranks: the embedding, the layers in order, the final norm, the head."""
    yield from (Unit(row) for row in family.rows if row.where is Where.INPUT)
    for layer, is_moe in enumerate(dims.moe_layers):
        present = {Where.EVERY_LAYER, Where.MOE_LAYER if is_moe else Where.DENSE_LAYER}
        rows = [row for row in family.rows if row.where in present]
        yield from (Unit(row, layer) for row in rows if not row.shard.is_expert)
        for expert in range(dims.experts if is_moe else 0):
            yield from (Unit(row, layer, expert) for row in rows if row.shard.is_expert)
    yield from (Unit(row) for row in family.rows if row.where is Where.OUTPUT)


@dataclass(frozen=True)
class Piece:
    """``length`` slices of a shard, from ``start`` on, are those of Hugging Face tensor ``source`` from ``hf_start``.

    ``source`` counts the row's tensors; None stands for padding, which is zero.
    """

    source: int | None
    hf_start: int
    start: int
    length: int


def pieces(row: Row, dims: Dimensions, *, rank: int, parts: int, shard_size: int) -> Iterator[Piece]:
    """The pieces of shard ``rank`` of ``parts``, each ``shard_size`` long along ``row.shard.dim``.

    ``parts`` is 1 for a replicated parameter, and any ``rank`` then holds all of it.

    Fusions are written for the whole parameter; a shard is the window of it that the rank holds. That also covers
    tensor-parallel groups larger than the number of key heads, where a window cuts through a query group.
    """
    window_start = rank * shard_size if row.shard.is_cut else 0
    position = 0
    for source, hf_start, length in _whole(row, dims, parts, shard_size):
        low = max(position, window_start)
        high = min(position + length, window_start + shard_size)
        if low < high:
            yield Piece(source, hf_start + low - position, low - window_start, high - low)
        position += length


def _whole(row: Row, dims: Dimensions, parts: int, shard_size: int) -> Iterator[tuple[int | None, int, int]]:
    """(source, start in it, length) of the unsharded parameter, in order."""
    lengths = [dims.shape(tensor)[row.shard.dim] for tensor in row.hf]
    match row.fuse:
        case Fuse.NONE:
            yield 0, 0, lengths[0]
        case Fuse.PAD_VOCAB:
            yield 0, 0, lengths[0]
            yield None, 0, parts * shard_size - lengths[0]
        case Fuse.QKV:
            for group in range(dims.query_groups):
                for source, length in enumerate(lengths):
                    size = length // dims.query_groups
                    yield source, group * size, size
        case Fuse.GATE_UP:
            for part in range(parts):
                for source, length in enumerate(lengths):
                    yield source, part * (length // parts), length // parts


def fits(row: Row, dims: Dimensions, shard_shape: tuple[int, ...], parts: int) -> bool:
    """Whether ``parts`` shards of this shape make up the row's parameter."""
    shapes = [dims.shape(tensor) for tensor in row.hf]
    dim = row.shard.dim
    if len(shard_shape) != len(shapes[0]):
        return False
    others_fit = all(shard_shape[i] == shapes[0][i] for i in range(len(shard_shape)) if i != dim)
    held, whole = shard_shape[dim] * parts, sum(shape[dim] for shape in shapes)
    return others_fit and (held >= whole if row.fuse is Fuse.PAD_VOCAB else held == whole)
