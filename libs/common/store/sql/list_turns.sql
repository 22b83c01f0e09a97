-- A thread's turns, newest first, before a number.
select * from turn_records
where thread = %(thread)s and (%(before)s::bigint is null or number < %(before)s)
order by number desc limit %(limit)s
