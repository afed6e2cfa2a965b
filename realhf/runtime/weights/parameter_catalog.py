"""ParameterCatalog: the parameter sets of a run, their homes, and which of them may share memory."""

from collections.abc import Collection, Mapping

from realhf.experiment import Role
from realhf.layout import Layout
from realhf.runtime.compile.actions import Reallocate, adapters_of, parameter_sets, parameter_specs


class ParameterCatalog:
    """The parameter sets of all roles; every rank has the same catalog.

    Two frozen sets read from the same source, such as a reference and the weights under adapters, are always
    equal. The weights of `offloaded` roles, which are frozen, are on the device only while they are in use.
    """

    def __init__(
        self, roles: Mapping[str, Role], homes: Mapping[str, Layout], *, offloaded: Collection[str] = ()
    ) -> None:
        self.roles = roles
        self.offloaded = frozenset(offloaded)
        self.sets = parameter_sets(roles)
        self.specs = parameter_specs(roles)
        # Read only once, as the directory of the adapters may change during a run.
        self.loras = {name: role.resolved_lora(weights=True) for name, role in roles.items()}
        self._homes = homes

    def home(self, name: str) -> Layout:
        """Return the home of a parameter set: that of its role."""
        return self._homes[self.sets[name].role]

    def trained_set(self, role: str) -> str:
        """Return the name of the parameter set that a role's train steps change."""
        return role if self.roles[role].lora is None else adapters_of(role)

    def is_sharded(self, name: str) -> bool:
        """Return whether train steps update only the optimizer's copy, of which each replica has a part."""
        return self.sets[name].is_sharded(self.home(name))

    def gathering(self, name: str) -> Reallocate:
        """Return the reallocation that updates the home of a sharded set from the optimizer's copy."""
        return Reallocate(name, self.home(name), name, self.home(name), sharded=True)

    def may_share(self, name: str, other: str) -> bool:
        """Return whether copies of `name` may use the memory of `other`, as both always have equal values."""
        if name == other:
            return True
        pair = [self.sets[name], self.sets[other]]
        if any(params.is_adapters or params.trained or params.follows is not None for params in pair):
            return False
        if any(params.engine == "megatron" for params in pair):
            return False  # Megatron-Core allocates its own memory.
        # A set that stays on the device cannot use memory that is freed between uses.
        stays_usable = name in self.offloaded or other not in self.offloaded
        return stays_usable and pair[0].weights_source == pair[1].weights_source

    def is_same_part(self, name: str, layout: Layout, other: Layout, *, rank: int) -> bool:
        """Return whether a rank holds the same regions, in the same order, of a set in both layouts."""
        if layout.engine != other.engine:
            return False
        spec = self.specs[name]
        return list(spec.held_by(layout, rank).items()) == list(spec.held_by(other, rank).items())

    def is_loaded_earlier(self, role: str) -> bool:
        """Return whether all ranks of a role's home hold equal weights, loaded for an earlier role."""
        home = self.home(role)
        earlier = list(self.roles)[: list(self.roles).index(role)]
        equal_homes = [self.home(other) for other in earlier if self.may_share(role, other)]
        return any(
            all(rank in other and self.is_same_part(role, home, other, rank=rank) for rank in home.ranks)
            for other in equal_homes
        )
