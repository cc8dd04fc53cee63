"""Commands on a pipeline: show, preview, reset, skip, replay, pause, resume, rename, rebind, forget, unblock."""
