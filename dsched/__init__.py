"""dsched: the load balancer and scheduler for wide expert parallelism, independent of the engine.

Import the part you need (`dsched.eplb`, `dsched.routing`, ...); this module stays empty so that
`import dsched` costs nothing and needs neither torch nor an engine.
"""

__version__ = "0.1.0"
