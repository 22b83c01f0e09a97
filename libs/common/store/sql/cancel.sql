-- Cancel what is still queued (rule 10); anything begun ends as the machine says.
update job_records r
set state = 'cancelled', outcome = %(outcome)s, ended_at = now()
where r.id = %(job)s and r.user_id = %(user)s and r.state = 'queued'
returning r.*
