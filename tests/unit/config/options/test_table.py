"""The option table: complete, spelled once, and consistent with itself."""

from collections import Counter

from accelerate.config.options import BY_NAME, FEATURES, OPTIONS, PARADIGMS, SECTIONS, SWITCH_OF_DISTRIBUTED_TYPE


def test_nothing_is_spelled_twice():
    for values in (
        [option.name for option in OPTIONS],
        [flag for option in OPTIONS for flag in option.spellings],
        [name for option in OPTIONS for name in (option.env, *option.env_names) if name],
        [(option.section, option.file_key) for option in OPTIONS if option.file_key],
    ):
        assert [value for value, count in Counter(values).items() if count > 1] == []


def test_rows_are_sound():
    for option in OPTIONS:
        assert option.help.endswith("."), option.help
        assert option.feature is None or option.feature in FEATURES, option.name
        assert option.section is None or option.section in SECTIONS, option.name
        if option.choices is not None and option.default is not None:
            assert option.default in option.choices, option.name
        if option.default is not None:
            assert option.parse(option.default) == option.default, option.name


def test_switches_exist():
    assert {feature.switch for feature in FEATURES.values()} <= set(BY_NAME)
    assert set(PARADIGMS) <= set(BY_NAME)
    assert {switch for switch in SWITCH_OF_DISTRIBUTED_TYPE.values() if switch} <= set(BY_NAME)
    assert {feature for feature in SECTIONS.values() if feature} <= set(FEATURES)
