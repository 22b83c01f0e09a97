-- Forget an agent.
delete from agents where agent = %(agent)s returning agent
