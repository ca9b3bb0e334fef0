"""How a config describes a site's own data. Works without torch."""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from dispfl.data.datasets import Data
from dispfl.data.own.factory import checked_name
from dispfl.errors import ConfigError

SIZE = 32
TEST_SHARE = 0.2


class OwnData(Data):
    """A site's own data: a file or a folder that `path` names, or what a function of the site's returns.

    A key without a value is decided by what the data are; one that does not fit them is refused.
    """

    FOR_FILES: ClassVar[tuple[str, ...]] = (
        "label",
        "size",
        "colour",
        "test_share",
        "test_path",
        "standardize",
        "augment",
    )

    name: Literal["own"] = "own"
    path: str | None = None
    """A CSV file, an NPZ file, or a folder with a sub-folder of pictures for each class."""
    factory: str | None = None
    """`module:function`, which returns (training data, test data)."""
    dir: str | None = None
    """Where a relative path or a module is looked for: the site's folder, or the working directory."""
    classes: tuple[str, ...] | None = None
    """All classes, in the order of the outputs; the sites of a federation need the same. The site's own, sorted."""
    label: str | None = None
    """CSV: the column with the class; `label`, or else the last."""
    size: int | None = Field(default=None, ge=8, le=4096)
    """Folder: pictures are stretched to so many pixels a side; 32."""
    colour: bool | None = None
    """Folder: pictures have three channels, or are made grey; true."""
    standardize: bool = False
    """Shift and scale each column (or channel) by the mean and the deviation of the site's training data."""
    test_share: float | None = Field(default=None, gt=0, lt=1)
    """The share of each class that is kept for testing; 0.2."""
    test_path: str | None = None
    """The test data, instead of a share of `path`."""
    augment: bool = False
    """Random crops in training, for pictures."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return name

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, factory: str | None) -> str | None:
        return factory and checked_name(factory)

    @field_validator("classes", mode="before")
    @classmethod
    def _listed(cls, classes: Any) -> Any:
        if classes is None:
            return None
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            raise ValueError(f"must be a list of at least two names, got {classes!r}.")
        names = tuple(str(name) for name in classes)  # classes may be called 0, 1, 2
        if len(names) < 2:
            raise ValueError(f"must be a list of at least two names, got {list(names)}.")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"names {twice!r} twice; give each class once.")
        return names

    def model_post_init(self, context: Any, /) -> None:
        """Refuse settings that do not fit each other."""
        if not self.path and not self.factory:
            raise ConfigError("data.path is missing: name a CSV file, an NPZ file or a folder; or give data.factory.")
        if self.path and self.factory:
            raise ConfigError("data.path and data.factory exclude each other; leave one away.")
        if self.test_path and self.test_share is not None:
            raise ConfigError("data.test_path and data.test_share exclude each other; leave one away.")
        if self.factory:
            self.refuse(self.FOR_FILES, f"data.factory={self.factory} returns data as they are used")

    def refuse(self, keys: Iterable[str], why: str) -> None:
        """Refuse keys that were given a value although they have nothing to say here."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"data.{key} does not apply: {why}. Leave it away.")
