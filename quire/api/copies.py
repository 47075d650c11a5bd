"""What cannot be copied says so: it stands for memory that is there once."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from quire.errors import RequestError


class Uncopied:
    """Refuses `copy` and `pickle`: a copy would use, and give back, what another holds."""

    instead: ClassVar[str] = ""
    """What to do instead."""

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise RequestError(f"a {type(self).__name__} is not copied or pickled: {self.instead}")
