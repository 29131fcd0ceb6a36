"""The browser's side of the platform: server-rendered pages, no build step, no foreign hosts."""
