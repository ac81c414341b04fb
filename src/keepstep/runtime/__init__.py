"""The processes: session, keeper, persister, agent."""
