"""The names of matrices' columns, remembered: a layout never changes."""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["KnownLayouts", "Layout"]

# Names that a process remembers, of all layouts together: some 20 MB.
MAX_NAMES = 100_000


class Layout:
    """The names of a matrix's columns, in order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._places = {name: place for place, name in enumerate(names)}

    def of(self, wanted: Sequence[str]) -> list[tuple[int, str]]:
        """The columns of these names, by place, without those that it lacks."""
        places = self._places
        return sorted((places[name], name) for name in wanted if name in places)


class KnownLayouts:
    """The layouts used last. The key is the digest of the names: what a number names may change
    when another database is put in the place of this one, what a digest names cannot.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._names = 0
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()

    def get(self, digest: bytes) -> Layout | None:
        """The layout, if it is remembered."""
        found = self._layouts.get(digest)
        if found is not None:
            self._layouts.move_to_end(digest)
        return found

    def keep(self, digest: bytes, names: Sequence[str]) -> Layout:
        """Remember a layout, and forget others that were not used for longest."""
        layout = Layout(names)
        if digest not in self._layouts:
            self._layouts[digest] = layout
            self._names += len(names)
            while self._names > self._max_names and len(self._layouts) > 1:
                _, forgotten = self._layouts.popitem(last=False)
                self._names -= len(forgotten.names)
        return layout
