-- Where the events of a run begin; the first answer stays.
update runs set first_seq = %(seq)s where run = %(run)s and first_seq is null
