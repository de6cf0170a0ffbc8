"""The OpenAI-compatible HTTP server: text in, token ids through the controller, text out."""

from dsched.frontdoor.door import FrontDoor
from dsched.frontdoor.models import ServedModel, load_model

__all__ = ["FrontDoor", "ServedModel", "load_model"]
