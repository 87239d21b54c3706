from tests.support.hub_server import hub

__all__ = ["hub"]
