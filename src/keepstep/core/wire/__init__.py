"""The wire between keepers as state machines over bytes: connections, links, messages."""
