-- Wake the relays for some runs (one was given back).
select pg_notify('towline_runs', v.run)::text as told from unnest(%(runs)b::text[]) as v(run)
