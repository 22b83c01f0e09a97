-- Complete the attempt of a turn whose terminal is published; see the function.
select towline_complete_turn(%(turn)s::uuid, %(run)s::uuid) as done
