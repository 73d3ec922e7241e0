"""What every table of the configuration is made of."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table: immutable, unknown keys refused."""

    @property
    def kind(self) -> str:
        """Which one it is, of tables that `kind` tells apart."""
        return str(self.__struct_config__.tag)
