from tests.hub_server import hub

__all__ = ["hub"]
