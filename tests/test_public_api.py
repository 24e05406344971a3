"""What `import kvcompress` offers."""

import inspect


def test_all_is_sorted_complete_and_resolves():
    import kvcompress

    assert kvcompress.__all__ == sorted(kvcompress.__all__)
    for name in kvcompress.__all__:
        assert getattr(kvcompress, name) is not None
    assert set(kvcompress.__all__) <= set(dir(kvcompress))


def test_every_error_is_exported_and_has_the_base():
    import kvcompress
    from kvcompress import errors

    found = {
        name: thing
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    }
    assert set(found) <= set(kvcompress.__all__)
    for name, thing in found.items():
        assert issubclass(thing, kvcompress.KVCompressError)
        assert name in errors.__doc__


def test_unknown_names():
    import pytest

    import kvcompress

    with pytest.raises(AttributeError, match="no attribute 'pres'"):
        _ = kvcompress.pres
    with pytest.raises(AttributeError, match="'NoSuchPolicy'"):
        _ = kvcompress.NoSuchPolicy


def test_every_policy_is_importable_by_its_class_name():
    import kvcompress
    from kvcompress.plugins import registry

    for name, entry in registry().policies.items():
        assert getattr(kvcompress, entry.policy.__name__) is entry.policy
        assert kvcompress.policy_from(name).name == name
        if entry.distribution == "kvcompress":
            assert entry.policy.__name__ in kvcompress.__all__


def test_every_field_and_policy_is_documented():
    from kvcompress.plugins import registry

    for entry in registry().policies.values():
        assert "Source:" in entry.policy.__doc__
        for field, info in entry.policy.model_fields.items():
            assert info.description, f"{entry.policy.__name__}.{field}"


def test_no_module_shadows_a_public_name():
    """A module named like a function would take its place once it is imported."""
    import pkgutil

    import kvcompress

    modules = {module.name for module in pkgutil.iter_modules(kvcompress.__path__)}
    assert not modules & set(kvcompress.__all__)
