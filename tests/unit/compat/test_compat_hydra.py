"""The internals of Hydra are where ``compat/hydra.py`` expects them."""

from collections.abc import Iterator

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase

from orchestrator.compat.hydra import own_hydra


@pytest.fixture(autouse=True)
def no_hydra() -> Iterator[None]:
    """Without the instances that other tests have left."""
    saved = dict(Singleton._instances)
    Singleton._instances.clear()
    yield
    Singleton._instances.clear()
    Singleton._instances.update(saved)


def test_hydra_of_the_calling_program_is_unchanged() -> None:
    theirs = GlobalHydra.instance()
    with own_hydra():
        assert GlobalHydra.instance() is not theirs
        VersionBase.instance()
    assert Singleton._instances == {GlobalHydra: theirs}


def test_hydra_of_the_calling_program_returns_after_an_error() -> None:
    @own_hydra()
    def broken() -> None:
        GlobalHydra.instance()
        raise ValueError("broken")

    theirs = GlobalHydra.instance()
    with pytest.raises(ValueError, match="broken"):
        broken()
    assert Singleton._instances == {GlobalHydra: theirs}
