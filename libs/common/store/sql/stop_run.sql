-- Ask the owner of a run to end it, and tell it at commit. An ended one stays as it is.
update runs set state = 'stopping'
where run = %(run)s and ended_at is null
returning run, pg_notify('towline_runs', run)::text as told
