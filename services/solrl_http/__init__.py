"""The HTTP side that all services share: access control, limits, problem documents, logs and the server itself."""
