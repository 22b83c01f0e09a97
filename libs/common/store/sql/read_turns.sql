-- Turns.
select * from turn_records where turn = any (%(turns)s::uuid[])
