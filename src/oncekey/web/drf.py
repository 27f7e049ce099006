"""Django REST framework."""


def install() -> None:
    pass
