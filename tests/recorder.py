"""A stand-in for a library."""


class Recorder:
    """Takes every attribute, call and assignment, and lists calls and assignments as (name, arguments, keywords)."""

    def __init__(self, name, calls):
        self.__dict__.update(_name=name, _calls=calls)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        child = self.__dict__[name] = type(self)(f"{self._name}.{name}", self._calls)
        return child

    def __setattr__(self, name, value):
        self._record(f"{self._name}.{name} =", (value,), {})
        self.__dict__[name] = value

    def __setitem__(self, key, value):
        self._record(f"{self._name}[{key!r}] =", (value,), {})

    def __call__(self, *args, **kwargs):
        self._record(self._name, args, kwargs)
        return type(self)(f"{self._name}()", self._calls)

    def __repr__(self):
        return f"<{self._name}>"

    def _record(self, name, args, kwargs):
        self._calls.append((name, args, kwargs))
