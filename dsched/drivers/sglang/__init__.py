"""SGLang: parts of dsched that run inside the engine, and the driver that talks to it."""
