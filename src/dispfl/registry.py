"""Components by name: methods, topologies, partitions, models and data sets.

A config names a component in one of three ways, everywhere (`run`, `compare`, `sweep`, `up`, sites,
resume, Ray):

    method=dispfl               a built-in component
    method=my_module:MyMethod   a class (for models and data sets, a function) in a module of the
                                current directory, of the site's folder or of the Python path
    method=mine                 a short name that an installed package declares as an entry point of
                                the group `dispfl.methods` (`dispfl.topologies`, `.partitions`,
                                `.models`, `.datasets`)

Built-in names have priority. A class is imported when it is looked up, so naming and listing
components is fast.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from dispfl.errors import ConfigError
from dispfl.settings import Settings, did_you_mean
from dispfl.user_functions import checked_name, has_module, import_reference

if TYPE_CHECKING:
    from dispfl.data.partition import Partition
    from dispfl.methods.base import Method
    from dispfl.topology import Topology

CUSTOM_KEYS: dict[str, tuple[str, ...]] = {
    "data": ("path", "hub", "factory"),
    "model": ("factory",),
}
"""Keys that only custom data and models have: `data.path=table.csv` needs no `data=custom`."""
FUNCTIONS = {"model": "dispfl.models", "data": "dispfl.datasets"}
"""Tables whose plug-ins are functions (`model.factory`), with their group of entry points."""

C = TypeVar("C", bound=Settings)


class Registry(Mapping[str, type[C]], Generic[C]):
    """The components of one kind, built in and of installed packages: classes by name."""

    def __init__(
        self, table: str, plural: str, bases: tuple[str, ...], built_in: Mapping[str, str]
    ) -> None:
        self.table = table
        self._group = f"dispfl.{plural}"
        self._bases = bases
        self._built_in = built_in

    def __getitem__(self, name: str) -> type[C]:
        if name in self._built_in:
            return cast(type[C], _load(self._built_in[name]))
        reference = _installed(self._group)[name]
        return self._checked(name, reference, import_reference(self.table, reference))

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        for name in _installed(self._group):
            if name not in self._built_in:
                yield name

    def __len__(self) -> int:
        return len(self._built_in.keys() | _installed(self._group).keys())

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in _installed(self._group)

    def find(self, name: str, folder: Path | None = None) -> type[C]:
        """Return the class of a name or a `module:Class` reference, if it exists."""
        if ":" not in name:
            if name not in self:
                raise ConfigError(
                    f"{self.table} {name!r} does not exist. {did_you_mean(name, self)}",
                    key=self.table,
                )
            return self[name]
        try:
            checked_name(name)
        except ValueError:
            raise ConfigError(
                f"{self.table} must be a name or module:Class, got {name!r}; "
                "for example mine:MyClass for the class MyClass in mine.py.",
                key=self.table,
            ) from None
        component = import_reference(self.table, name, _modules_folder(name, folder))
        return self._checked(name, name, component)

    def name_of(self, component: C) -> str:
        """Return the name or reference by which a config finds the class of a component again."""
        cls = type(component)
        reference = f"{cls.__module__}:{cls.__qualname__}"
        for name, target in self._built_in.items():
            if target == reference:
                return name

        # Its package may export it under a shorter module name than the one that it is defined in.
        package = cls.__module__.partition(".")[0]
        for name, target in _installed(self._group).items():
            module, _, class_name = target.partition(":")
            is_exported = module.partition(".")[0] == package and class_name == cls.__qualname__
            if is_exported and self.get(name) is cls:
                return name
        return reference

    def built_in_classes(self) -> list[type[Settings]]:
        """Return the classes of the built-in components."""
        return [_load(reference) for reference in self._built_in.values()]

    def _checked(self, name: str, reference: str, component: Any) -> type[C]:
        """Return what a reference names if it is a complete class of this kind."""
        bases = tuple(_load(base) for base in self._bases)
        if not _is_subclass(component, bases):
            base_names = " or ".join(f"dispfl.{base.__name__}" for base in bases)
            classes = _classes_of(sys.modules[reference.partition(":")[0]], bases)
            hint = ""
            if classes:
                hint = f" {did_you_mean(name.partition(':')[2] or name, classes)}"
            raise ConfigError(
                f"{self.table} {name} must be a subclass of {base_names}, got"
                f" {_described(component)}.{hint}",
                key=self.table,
            )
        if inspect.isabstract(component):
            missing = " and ".join(sorted(component.__abstractmethods__))
            raise ConfigError(
                f"{self.table} {name} is incomplete: define {missing} in {component.__name__}.",
                key=self.table,
            )
        return cast(type[C], component)


METHODS: "Registry[Method]" = Registry(
    "method",
    "methods",
    ("dispfl.methods.base:GossipMethod", "dispfl.methods.base:ServerMethod"),
    {
        "dispfl": "dispfl.methods.dispfl:DisPFL",
        "local": "dispfl.methods.local:Local",
        "fedavg": "dispfl.methods.fedavg:FedAvg",
        "fedavg-ft": "dispfl.methods.finetuned:FedAvgFT",
        "ditto": "dispfl.methods.ditto:Ditto",
        "fedfomo": "dispfl.methods.fedfomo:FedFOMO",
        "subfedavg": "dispfl.methods.subfedavg:SubFedAvg",
        "dpsgd": "dispfl.methods.dpsgd:DPSGD",
        "dpsgd-ft": "dispfl.methods.finetuned:DPSGDFT",
        "dfedavgm": "dispfl.methods.dfedavgm:DFedAvgM",
        "dfedsam": "dispfl.methods.dfedsam:DFedSAM",
        "dfedpgp": "dispfl.methods.dfedpgp:DFedPGP",
        "da-dpfl": "dispfl.methods.da_dpfl:DADPFL",
        "ssfl": "dispfl.methods.ssfl:SSFL",
        "fedprox": "dispfl.methods.fedprox:FedProx",
        "scaffold": "dispfl.methods.scaffold:SCAFFOLD",
        "fedper": "dispfl.methods.fedrep:FedPer",
        "fedrep": "dispfl.methods.fedrep:FedRep",
        "fedbn": "dispfl.methods.fedbn:FedBN",
        "apfl": "dispfl.methods.apfl:APFL",
        "fedala": "dispfl.methods.fedala:FedALA",
    },
)
TOPOLOGIES: "Registry[Topology]" = Registry(
    "topology",
    "topologies",
    ("dispfl.topology.base:Topology",),
    {
        "ring": "dispfl.topology.built_in:Ring",
        "full": "dispfl.topology.built_in:Full",
        "random": "dispfl.topology.built_in:RandomRegular",
        "grid": "dispfl.topology.built_in:Grid",
        "exponential": "dispfl.topology.built_in:Exponential",
        "file": "dispfl.topology.from_graph:GraphTopology",
    },
)
PARTITIONS: "Registry[Partition]" = Registry(
    "partition",
    "partitions",
    ("dispfl.data.partition:Partition",),
    {
        "dirichlet": "dispfl.data.partition:Dirichlet",
        "grouped": "dispfl.data.partition:Grouped",
        "pathological": "dispfl.data.partition:Pathological",
        "iid": "dispfl.data.partition:IID",
        "by_column": "dispfl.data.partition:ByColumn",
    },
)
REGISTRIES: dict[str, Registry[Any]] = {
    registry.table: registry for registry in (METHODS, TOPOLOGIES, PARTITIONS)
}


def as_table(key: str, value: Any) -> dict[str, Any]:
    """Return a table of settings, given as a mapping or by name alone."""
    if not isinstance(value, (str, Mapping)):
        raise ConfigError(f"{key} must be a name or a table, got {value!r}.", key=key)
    table = {"name": value} if isinstance(value, str) else dict(value)
    if key not in FUNCTIONS:
        return table
    name = table.get("name")
    reference = _function(key, name) if isinstance(name, str) else None
    if reference:
        return {**table, "name": "custom", "factory": reference}
    if not table.keys().isdisjoint(CUSTOM_KEYS[key]):
        return {"name": "custom", **table}
    return table


def choose(key: str, value: Any, default: Any, folder: Path | None = None) -> Settings:
    """Return the settings of a table with a choice of components, given by a mapping or a name.

    A `module:Class` reference is looked up in the folder first; by default in the current
    directory.
    """
    if isinstance(value, Settings):
        return value
    table = as_table(key, value)
    name = str(table.get("name", getattr(default, "name", "")))
    if key in REGISTRIES:
        table.pop("name", None)
        component = REGISTRIES[key].find(name, folder)
        if folder is not None:
            table = component.located(table, folder)
        return cast(Settings, component(**table))
    built_in, custom = _kinds(key)
    if name == "custom":
        return custom(**table)
    if name not in _built_in_names(key):
        names = {*_built_in_names(key), *_installed(FUNCTIONS[key])}
        raise ConfigError(f"{key} {name!r} does not exist. {did_you_mean(name, names)}", key=key)
    for field in table:
        if field in CUSTOM_KEYS[key]:
            raise ConfigError(
                f"{key}.{field} and {key}.name={name} exclude each other; omit one of them.",
                key=f"{key}.{field}",
            )
        if field in custom.model_fields and field not in built_in.model_fields:
            custom_keys = ", ".join(f"{key}.{name}" for name in CUSTOM_KEYS[key])
            needed = " or ".join(custom_keys.rsplit(", ", 1))
            raise ConfigError(
                f"{key}.{field} requires {needed}; set that too.", key=f"{key}.{field}"
            )
    return built_in(**table)


def settings_classes(key: str) -> list[type[Settings]]:
    """Return the settings classes of the built-in components of a table, for suggestions."""
    if key not in REGISTRIES:
        return list(_kinds(key))
    return REGISTRIES[key].built_in_classes()


def _function(key: str, name: str) -> str | None:
    """Return the `module:function` of a user's model or data set; None for a built-in one."""
    if ":" in name:
        return name
    if name == "custom" or name in _built_in_names(key):
        return None
    return _installed(FUNCTIONS[key]).get(name)


def _built_in_names(key: str) -> Mapping[str, Any]:
    """Return the built-in models or data sets, by name."""
    if key == "model":
        names = import_module("dispfl.models.settings").MODELS
    else:
        names = import_module("dispfl.data.catalogue").DATASETS
    return cast(Mapping[str, Any], names)


def _kinds(key: str) -> tuple[type[Settings], type[Settings]]:
    """Return the settings of built-in and of custom models or data."""
    if key == "model":
        return _load("dispfl.models.settings:Model"), _load("dispfl.models.settings:CustomModel")
    return _load("dispfl.data.datasets:Data"), _load("dispfl.data.datasets:CustomData")


def _is_subclass(value: Any, bases: tuple[type, ...]) -> bool:
    return isinstance(value, type) and issubclass(value, bases)


def _classes_of(module: ModuleType, bases: tuple[type, ...]) -> list[str]:
    """Return the names of the classes of a kind that a module defines."""
    names = []
    for name, value in vars(module).items():
        if _is_subclass(value, bases) and value.__module__ == module.__name__:
            names.append(name)
    return names


def _described(value: object) -> str:
    """Return `the class Ring`, or `an int`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    type_name = type(value).__name__
    article = "an" if type_name[0] in "aeiou" else "a"
    return f"{article} {type_name}"


@cache
def _load(reference: str) -> type[Settings]:
    """Import a class of this package."""
    module, _, name = reference.partition(":")
    return cast(type[Settings], getattr(import_module(module), name))


@cache
def _installed(group: str) -> dict[str, str]:
    """Return the components of installed packages: references by name."""
    from importlib.metadata import entry_points  # slow to import, and not needed for built-in names

    return {entry.name: f"{entry.module}:{entry.attr}" for entry in entry_points(group=group)}


def is_installed(reference: str) -> bool:
    """Whether an installed package declares a `module:name` as an entry point of dispfl."""
    groups = ["dispfl.methods", "dispfl.topologies", "dispfl.partitions", *FUNCTIONS.values()]
    return any(reference in _installed(group).values() for group in groups)


def _modules_folder(name: str, folder: Path | None) -> Path:
    """Return the folder of a user's modules.

    The current directory is searched too, after a site's folder, if it has the module.
    """
    current_folder = Path.cwd()
    if (
        folder is not None
        and str(current_folder) not in sys.path
        and has_module(current_folder, name)
    ):
        sys.path.append(str(current_folder))
    return (folder or Path()).expanduser().absolute()
