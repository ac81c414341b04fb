"""What a user may set: one table of options, and how values are found for them."""

from __future__ import annotations

from keepstep.config.settings import (
    ENDING,
    Config,
    Settings,
    check_socket_path,
    ending_dir_of,
    from_environ,
    from_mapping,
    job_dir_of,
    resolve,
    settings_from_text,
    user_dir,
)

__all__ = [
    "ENDING",
    "Config",
    "Settings",
    "check_socket_path",
    "ending_dir_of",
    "from_environ",
    "from_mapping",
    "job_dir_of",
    "resolve",
    "settings_from_text",
    "user_dir",
]
