"""What of a chain of overlays is seen equals what reading the chain from the top says."""

from hypothesis import given
from hypothesis import strategies as st

from smolbuild.store.qcow2 import CLUSTER, Extent
from smolbuild.store.shadow import data_ranges_of, without_shadowed

CLUSTERS = 12
layer = st.dictionaries(st.integers(0, CLUSTERS - 1), st.sampled_from(["data", "zero"]))


def extents(clusters: dict[int, str]) -> list[Extent]:
    """Return one extent for each run of clusters of a kind; data lie behind each other."""
    made: list[Extent] = []
    for place, number in enumerate(sorted(clusters)):
        kind, offset = clusters[number], number * CLUSTER
        host = (place + 5) * CLUSTER if kind == "data" else 0
        last = made[-1] if made else None
        if last and last.kind == kind and last.guest_offset + last.length == offset:
            made[-1] = Extent(
                guest_offset=last.guest_offset,
                length=last.length + CLUSTER,
                kind=last.kind,
                host_offset=last.host_offset,
            )
        else:
            made.append(Extent(guest_offset=offset, length=CLUSTER, kind=kind, host_offset=host))
    return made


def places(found: tuple[Extent, ...] | list[Extent]) -> dict[int, tuple[str, int]]:
    """Return kind and host offset of each cluster."""
    return {
        (extent.guest_offset + at) // CLUSTER: (
            extent.kind,
            extent.host_offset + at if extent.kind == "data" else 0,
        )
        for extent in found
        for at in range(0, extent.length, CLUSTER)
    }


@given(st.lists(layer, max_size=5))
def test_only_what_no_layer_above_decides_is_left(chain: list[dict[int, str]]) -> None:
    layers = [extents(clusters) for clusters in chain]
    for number, seen in enumerate(without_shadowed(layers)):
        above = {cluster for clusters in chain[number + 1 :] for cluster in clusters}
        whole = places(layers[number])
        assert places(seen) == {n: what for n, what in whole.items() if n not in above}


@given(st.lists(layer, max_size=5))
def test_the_ranges_of_all_data(chain: list[dict[int, str]]) -> None:
    ranges = data_ranges_of([extents(clusters) for clusters in chain])
    held = {
        n
        for offset, length in ranges
        for n in range(offset // CLUSTER, (offset + length) // CLUSTER)
    }
    assert held == {n for clusters in chain for n, kind in clusters.items() if kind == "data"}
    ends = [offset + length for offset, length in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False))
