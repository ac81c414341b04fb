"""Tree: everything that is no tensor, pickled, with an index in each tensor's place; and back.

The pickler's `reducer_override` sees every tensor wherever it hides (in lists, in custom objects)
and leaves plain values to the fast path. Tensors that share memory, type and shape are kept once:
tied weights stay tied. A DTensor contributes its local part, with what it takes to make a DTensor
of it again: the layout says which box of the whole it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from keepstep.edge.torch.digests import WORD_BYTES
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.parts import PlaceOfPart, refuse_dead, unwrapped
from keepstep.edge.torch.pickles.checked import Vocabulary, load_pickles
from keepstep.edge.torch.pickles.known import Call, Known, Name
from keepstep.errors import ConfigError, LayoutError, UntrustedError
from keepstep.model.layout import Shard, TensorSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# A state is so many pickled trees: what seldom changes; what lies beside it; random states; what
# changes with each step and the plain values, which know each other's objects.
SECTIONS = (1, 1, 1, 2)

AT_BOUNDARY = (-1, 0)  # before all updates
DIGESTING = frozenset({"cuda"})  # kinds of devices, see `frozen_digests.py`

_NUMBERS = {int, float, bool, str, type(None)}
_GLOBALS = (type, FunctionType, BuiltinFunctionType)  # pickled by their names

# A mesh as it is written down: device type, dimension names, shape, ranks.
MeshKey = tuple[str, tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StateItem:
    """A tensor to keep: `local` is a plain tensor whose memory is the truth; `lazy` ones stand
    still until the next update, `frozen` ones belong to no optimizer (`frozen.py`).

    `address` is where its bytes lie as they are to be kept, None when they must go through torch.
    `whole`: the DTensor that `local` is this rank's part of, if it is one. `turn`: of a lazy one,
    whose update overwrites it, and after how many others.
    """

    spec: TensorSpec
    local: torch.Tensor
    lazy: bool
    address: int | None = None
    whole: DTensor | None = None
    turn: tuple[int, int] = AT_BOUNDARY
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class _At:
    """Stands in the tree where tensor `index` is."""

    index: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """Stands in the tree where a list of successive numbers is, and comes back as that list: it
    costs the same to name and to pickle however long it is."""

    first: int
    end: int

    @classmethod
    def of(cls, numbers: list[int]) -> list[int] | Numbers:
        """The same list where they are not successive."""
        first = numbers[0] if numbers else 0
        made = cls(first, first + len(numbers))
        return made if numbers == list(range(made.first, made.end)) else numbers


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor on this rank."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local.detach()


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether its memory is, value for value, what is kept."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def by_address(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is, byte for byte, what is to be kept."""
    return tensor.device.type == "cpu" and is_flat(tensor)


def has_words(tensor: torch.Tensor) -> bool:
    """Whether its memory can be looked at as whole words where it is."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin % WORD_BYTES == 0 and tensor.nbytes % WORD_BYTES == 0


def can_be_digested(tensor: torch.Tensor) -> bool:
    """Whether its device can tell that it is as it was."""
    return tensor.device.type in DIGESTING and is_flat(tensor) and has_words(tensor)


Place = tuple[Any, ...]


def look_of(tensor: torch.Tensor) -> Place:
    """What of a tensor decides how its bytes are kept, but for where they lie."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def place_of(tensor: torch.Tensor, look: Place | None = None) -> Place | None:
    """Equal for two tensors that are the same bytes, looked at alike. None where there are none.
    `look`: its `look_of`, where that is known."""
    if not tensor.numel():
        return None
    return (tensor.data_ptr(), *(look_of(tensor) if look is None else look))


def mesh_key(mesh: DeviceMesh) -> MeshKey:
    """Equal for two meshes of the same ranks in the same places."""
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    ranks = mesh.mesh
    return mesh.device_type, names, tuple(ranks.shape), tuple(ranks.flatten().tolist())


def name_tensors(tree: Any, name: str, names: dict[int, str]) -> None:
    """Fill `names` with the dotted path of every tensor in dicts, lists and tuples."""
    for path, tensor in named_tensors(tree, name):
        names.setdefault(id(tensor), path)


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in dicts, lists and tuples, with its dotted path; what holds itself is not gone
    through again."""
    return _named_tensors(tree, name, set())


def _named_tensors(tree: Any, name: str, around: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    around.add(id(tree))
    prefix = f"{name}." if name else ""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if type(value) in _NUMBERS:
            continue  # most of what long lists hold
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in around:
            yield from _named_tensors(value, f"{prefix}{key}", around)
    around.discard(id(tree))


def shared_names(tree: Any) -> dict[str, str]:
    """The names of tensors that are the same memory as one that comes before, with its name."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, tensor in named_tensors(tree):
        if tensor.layout is torch.strided and tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
            if first.setdefault(place, name) != name:
                shared[name] = first[place]
    return shared


def _fetch(index: int) -> torch.Tensor:
    raise AssertionError(f"tensor {index} fetched outside of a tree")


def _as_leaf(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """A tensor that learns: a plain one would come back deaf to its gradients."""
    return (
        torch.nn.Parameter(tensor, requires_grad)
        if is_parameter
        else tensor.requires_grad_(requires_grad)
    )


def _as_dtensor(
    local: torch.Tensor, mesh: MeshKey, placements: Any, shape: Any, stride: Any
) -> Any:
    raise AssertionError("a DTensor made outside of a tree")


class Kept:
    """The tensors of one state as they are found, in order. `still`: addresses of what stands still
    until the next update, with their turns (`StateItem`); `specs`, by name, and `kinds`, every
    class and function that was pickled, outlive it. `base`: what was found before, whose numbers
    come first. `frozen`: addresses of what no optimizer moves."""

    def __init__(
        self,
        still: Mapping[int, tuple[int, int]] | None = None,
        eager_names: Set[str] = frozenset(),
        specs: dict[str, tuple[Any, TensorSpec]] | None = None,
        base: Kept | None = None,
        kinds: set[Any] | None = None,
        frozen: Set[int] = frozenset(),
    ) -> None:
        self._frozen = frozen
        self.still = {} if still is None else still
        self.kinds = set() if kinds is None else kinds
        self.items: list[StateItem] = []
        self._eager_names = eager_names
        self._specs = {} if specs is None else specs
        self._base = base
        self._first: int = 0 if base is None else base.total
        self._seen: dict[tuple[Any, ...], int] = {}
        self._taken: set[str] = set()  # names

    def after(self) -> Kept:
        """For what is found from here on; this one stays as it is."""
        return Kept(self.still, self._eager_names, self._specs, self, self.kinds)

    @property
    def total(self) -> int:
        return self._first + len(self.items)

    def keep(self, value: torch.Tensor, names: Mapping[int, str]) -> int:
        """The number under which its bytes are kept, once however many names they have. `names`: by
        `id(tensor)`."""
        local = local_part(value)
        look = look_of(local)
        key = place_of(local, look)
        known = None if key is None else self._find(key)
        if known is not None:
            return known
        index = self.total
        if key is not None:
            self._seen[key] = index
        name = self._own_name(names.get(id(value), f"<hidden {index}>"))
        address = local.data_ptr()
        is_eager = name in self._eager_names
        turn = None if is_eager else self.still.get(address)
        has_address = by_address(local)
        self.items.append(
            StateItem(
                self._spec(name, value, local, look),
                local,
                lazy=turn is not None,
                address=address if has_address else None,
                whole=value if is_dtensor(value) else None,
                turn=turn or AT_BOUNDARY,
                frozen=turn is None
                and not is_eager
                and address in self._frozen
                and (has_address or can_be_digested(local)),
            )
        )
        return index

    def _own_name(self, name: str) -> str:
        """That of no other: `{"a.b": x, "a": {"b": y}}` has two of one path."""
        number, own = 1, name
        while self._is_taken(own):
            number += 1
            own = f"{name}#{number}"
        self._taken.add(own)
        return own

    def _is_taken(self, name: str) -> bool:
        return name in self._taken or (self._base is not None and self._base._is_taken(name))

    def _find(self, key: tuple[Any, ...]) -> int | None:
        index = self._seen.get(key)
        return self._base._find(key) if index is None and self._base is not None else index

    def _spec(self, name: str, tensor: torch.Tensor, local: torch.Tensor, look: Any) -> TensorSpec:
        if is_dtensor(tensor):
            look = (*look, tensor.shape, tensor.placements, tensor.device_mesh)
        known = self._specs.get(name)
        if known is None or known[0] != look:
            known = self._specs[name] = (look, _spec(name, tensor, local))
        return known[1]


class TreePickler(pickle.Pickler):
    """For one section of a state. `names` by `id(tensor)`; `parts`: the paths of live objects by
    their id."""

    def __init__(self, kept: Kept, names: Mapping[int, str], parts: Mapping[int, str]) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=5)
        self._kept, self._names, self._parts = kept, names, parts
        self._meshes: dict[int, MeshKey] = {}
        self._in_values = False

    def states(self, states: Any) -> bytes:
        """What parts have told of themselves."""
        self.dump(states)
        return self.buffer.getvalue()

    def states_and_values(self, states: Any, values: Any) -> bytes:
        """Two trees, one behind the other. The plain values may hold parts."""
        self.dump(states)
        self._in_values = True
        self.dump(values)
        return self.buffer.getvalue()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _At):
            return _fetch, (value.index,)
        if isinstance(value, Numbers):
            return list, (range(value.first, value.end),)
        if not isinstance(value, torch.Tensor):
            self._kept.kinds.add(value if isinstance(value, _GLOBALS) else type(value))
            if self._in_values:
                path = self._parts.get(id(unwrapped(value)))
                if path is not None:
                    return PlaceOfPart, (path,)
                refuse_dead(value)
            return NotImplemented
        if not is_plain(value):
            return NotImplemented
        is_parameter = isinstance(value, torch.nn.Parameter)
        kept = _At(self._kept.keep(value, self._names))
        made: tuple[Callable[..., Any], tuple[Any, ...]] = (_fetch, (kept.index,))
        if is_dtensor(value):
            made = _as_dtensor, (kept, *self._placement(value))
        elif value.is_leaf and (is_parameter or value.requires_grad):
            made = _as_leaf, (kept, is_parameter, value.requires_grad)
        return made

    def _placement(self, tensor: DTensor) -> tuple[Any, ...]:
        mesh = tensor.device_mesh
        key = self._meshes.get(id(mesh))
        if key is None:
            key = self._meshes[id(mesh)] = mesh_key(mesh)
        return key, tensor.placements, tuple(tensor.shape), tuple(tensor.stride())


def is_plain(tensor: torch.Tensor) -> bool:
    """Dense memory we can copy; sparse, quantized and other wrapped tensors go through pickle as a
    whole. Raises ConfigError when it has no memory."""
    if tensor.is_meta:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} is on the meta device: it has no bytes "
            "to protect yet"
        )
    if is_dtensor(tensor):
        return True
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _spec(name: str, tensor: torch.Tensor, local: torch.Tensor) -> TensorSpec:
    shard = None
    if is_dtensor(tensor):
        # what torch's own DCP uses
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(shape) != tuple(local.shape):
            raise ConfigError(
                f"{name}: placements {tensor.placements} are not a box of the whole tensor"
            )
        shard = Shard(tuple(tensor.shape), tuple(offsets))
    # A dimension of one may have any stride and still count as contiguous; an expanded tensor comes
    # back as a whole one.
    as_usual = (local.is_contiguous() and 1 not in local.shape) or 0 in local.stride()
    stride = None if as_usual else tuple(local.stride())
    return TensorSpec(
        name,
        str(local.dtype).removeprefix("torch."),
        tuple(local.shape),
        local.numel() * local.element_size(),
        stride,
        shard,
    )


@dataclass(frozen=True, slots=True)
class _Makers:
    """What makes tensors of what stands in a tree for them. `meshes`: where DTensors are made anew;
    None leaves their local parts in their places."""

    tensors: Sequence[torch.Tensor]
    meshes: Mapping[MeshKey, DeviceMesh] | None

    def calls(self) -> dict[Name, Call]:
        """By the names that the pickler writes."""
        return {
            (__name__, _fetch.__name__): self.fetch,
            (__name__, _as_leaf.__name__): _as_leaf,
            (__name__, _as_dtensor.__name__): self.whole,
        }

    def fetch(self, index: int) -> torch.Tensor:
        """A tensor by its number."""
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise UntrustedError(f"expected one of {len(self.tensors)} tensors, found {index!r}")
        return self.tensors[index]

    def whole(
        self, local: torch.Tensor, key: MeshKey, placements: Any, shape: Any, stride: Any
    ) -> torch.Tensor:
        """The DTensor that a tensor is the local part of."""
        if self.meshes is None:
            return local
        mesh = self.meshes.get(key)
        if mesh is None:
            raise LayoutError(
                f"the snapshot has a DTensor of shape {list(shape)} over the mesh {key[2]} of "
                f"ranks {list(key[3])}, and no protected DTensor of this program is on such a mesh"
            )
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def rebuild(
    objects: bytes,
    tensors: Sequence[torch.Tensor],
    vocabulary: Callable[[dict[Name, Call]], Vocabulary] = Known,
    meshes: Mapping[MeshKey, DeviceMesh] | None = None,
) -> dict[str, Any]:
    """The tree from its pickled form and its tensors. `vocabulary`: what it may consist of, given
    what makes tensors; `meshes`: see `_Makers`. Raises LayoutError when a mesh is missing,
    UntrustedError when the bytes say what the vocabulary does not know."""
    makers = _Makers(tensors, meshes)
    sections = load_pickles(objects, SECTIONS, vocabulary(makers.calls()))
    tree: dict[str, Any] = {}
    for section in sections:
        if type(section) is not dict:
            raise UntrustedError(f"expected a dict of states, found a {type(section).__name__}")
    for section in sections[:-1]:
        for name, state in section.items():
            tree[name] = {**tree[name], **state} if name in tree else state
    return {**tree, **sections[-1]}
