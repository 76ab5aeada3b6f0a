"""The processes of a server: `serve`, the engine's process and the front end's."""

from importlib import import_module


def load_choices() -> None:
    """Register the options of admission and transports, and the names of all parsers."""
    import_module("blinkpy.dpu.tools.reasoning")
    import_module("blinkpy.dpu.tools.call_format").call_formats()
    import_module("blinkpy.dpu.admission.admission_options")
    import_module("blinkpy.dpu.link.connectors")
    import_module("blinkpy.dpu.fleet.fleet_options")
    import_module("blinkpy.engine.link.listeners")
