-- How a run ended (rule 29); guarded, so that it ends once.
update runs set state = %(state)s, reason = %(reason)s, last_seq = %(last_seq)s, ended_at = now()
where run = %(run)s and ended_at is null
returning run
