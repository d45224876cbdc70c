"""The HTTP side: access control, limits, routes, problem documents and the status page."""
