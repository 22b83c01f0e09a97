-- Keep claims; see the function.
select * from towline_keep_turns(%(runs)s::uuid[], %(claim_s)s::integer)
