-- How a source ended; the first answer stays.
update run_sources set state = %(state)s, reason = %(reason)s, detail = %(detail)s
where run = %(run)s and source = %(source)s and state is null
