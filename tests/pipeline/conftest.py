from ranks import ranks  # noqa: F401 - the fixture
