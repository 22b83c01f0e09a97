// The variants of the window (window.hpp and window_state.hpp have the model). First what we run, then the three
// scripts apart, then what breaks when one rule is taken away.
#include "window.hpp"

using O = Window::Options;
using W = Window;

enum Hints : int { UUU = 0, HUU = 1, UHU = 2, HHU = 3, UUH = 4, HUH = 5, UHH = 6, HHH = 7 };

void one_fault(O& o, Hints hints) {
  o.faults = 1;
  o.hinted = hints;
}
void two_faults(O& o, Hints hints) {
  o.accepted_before = true;
  o.hinted = hints;
}
void poison(O& o, Hints hints, int job) {
  o.faults = 0;
  o.hinted = hints;
  o.poison = job;
  o.limit = 2;
}
void hang(O& o, Hints hints) {
  one_fault(o, hints);
  o.hang = 0;
}
void hint_changes(O& o, Hints hints) {
  two_faults(o, hints);
  o.hint_changes = 1;
}

const std::vector<Variant<Window>> VARIANTS = {
    // What we run.
    {"serve-UHU", holds(39234),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
     }},
    {"serve-HUU", holds(39696),
     [](O& o) {
       o.serve = true;
       one_fault(o, HUU);
     }},
    {"serve-UUH", holds(40598),
     [](O& o) {
       o.serve = true;
       one_fault(o, UUH);
     }},
    {"serve-HHU", holds(41816),
     [](O& o) {
       o.serve = true;
       one_fault(o, HHU);
     }},
    {"serve-sleep", holds(39998),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.sleeps = 1;
     }},
    {"serve-poison-HHH", holds(20731),
     [](O& o) {
       o.serve = true;
       poison(o, HHH, 1);
     }},
    {"serve-poison-HHU", holds(19471),
     [](O& o) {
       o.serve = true;
       poison(o, HHU, 1);
     }},
    {"serve-poison-UHH", holds(3038),
     [](O& o) {
       o.serve = true;
       poison(o, UHH, 0);
     }},
    {"serve-lane-busy", holds(40521),
     [](O& o) {
       o.serve = true;
       hang(o, UHU);
       o.hang_keeps_lane = o.lane_busy = true;
     }},
    {"serve-UHU-2-faults", holds(2'356'963),
     [](O& o) {
       o.serve = true;
       two_faults(o, UHU);
     }},
    {"serve-HHU-2-faults", holds(2'512'494),
     [](O& o) {
       o.serve = true;
       two_faults(o, HHU);
     }},
    {"serve-HUU-2-faults", holds(2'674'494),
     [](O& o) {
       o.serve = true;
       two_faults(o, HUU);
     }},
    {"serve-UUU-2-faults", holds(2'968'069),
     [](O& o) {
       o.serve = true;
       two_faults(o, UUU);
     }},
    {"serve-window-1-2-faults", holds(1'138'251),
     [](O& o) {
       o.serve = true;
       two_faults(o, UHU);
       o.window = 1;
     }},
    {"serve-window-3-2-faults", holds(2'783'977),
     [](O& o) {
       o.serve = true;
       two_faults(o, HHU);
       o.window = 3;
     }},
    {"serve-arrivals-2-faults", holds(2'135'734),
     [](O& o) {
       o.serve = true;
       o.freezes = o.kills = 0;
     }},
    {"serve-hint-changes", holds(2'728'192),
     [](O& o) {
       o.serve = true;
       hint_changes(o, HUU);
       o.hint_in_frame = true;
     }},
    {"serve-UHU-3-cuts", holds(5'154'461),
     [](O& o) {
       o.serve = true;
       two_faults(o, UHU);
       o.faults = 3;
       o.ends = o.freezes = o.flushes = 0;
     }},
    // What a call that runs late costs: order, and up to a heartbeat. Nothing else.
    {"serve-late-calls", holds(40083),
     [](O& o) {
       o.serve = o.calls_run_late = true;
       one_fault(o, UHU);
       o.order_asked = false;
     }},
    {"serve-late-calls-refused", holds(39294),
     [](O& o) {
       o.serve = o.calls_run_late = o.late_calls_refused = true;
       one_fault(o, UHU);
     }},
    {"serve-sweeper-does-not-settle", holds(23784),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.sweeper_settles = false;
     }},
    {"X-serve-late-calls", breaks(W::IN_ORDER, 12743),
     [](O& o) {
       o.serve = o.calls_run_late = true;
       one_fault(o, UHU);
     }},
    {"X-serve-takes-first", breaks(W::IN_ORDER, 11348),
     [](O& o) {
       o.serve = true;
       two_faults(o, UHU);
       o.serve_takes_first = true;
     }},
    {"X-serve-own-not-claimed", breaks(W::IN_ORDER, 1218),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.own_entries_claimed = false;
     }},
    {"X-serve-not-after-a-lost-answer", breaks(W::IN_ORDER, 1228),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.claim_after_lost_answer = false;
     }},
    {"X-serve-ids-not-dropped", breaks(W::NOT_TWICE_AT_ONCE, 1575),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.in_flight_dropped = false;
     }},
    {"X-serve-in-flight-by-entry", breaks(W::NOT_TWICE_AT_ONCE, 1256),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.in_flight_by_job = false;
     }},
    {"X-serve-in-flight-until-result", breaks(W::NOT_AFTER_OUTCOME, 5181),
     [](O& o) {
       o.serve = true;
       one_fault(o, UHU);
       o.in_flight_until_settled = false;
     }},
    {"X-serve-rest-of-claim-waits", breaks(W::IN_ORDER, 99335),
     [](O& o) {
       o.serve = true;
       two_faults(o, UHU);
       o.rest_claimed_first = false;
     }},
    // Three scripts.
    {"UHU", holds(40638), [](O& o) { one_fault(o, UHU); }},
    {"HUU", holds(41099), [](O& o) { one_fault(o, HUU); }},
    {"UUH", holds(42064), [](O& o) { one_fault(o, UUH); }},
    {"HHU", holds(43578), [](O& o) { one_fault(o, HHU); }},
    {"hang-UHU", holds(40638), [](O& o) { hang(o, UHU); }},
    {"hang-HUU", holds(41099), [](O& o) { hang(o, HUU); }},
    {"sleep", holds(41402),
     [](O& o) {
       one_fault(o, UHU);
       o.sleeps = 1;
     }},
    {"sleep-2-faults", holds(575770),
     [](O& o) {
       two_faults(o, UHU);
       o.sleeps = 1;
       o.freezes = o.flushes = o.worker_kills = o.kills = 0;
     }},
    {"poison-HHH", holds(5485), [](O& o) { poison(o, HHH, 0); }},
    {"poison-HHH-middle", holds(20671), [](O& o) { poison(o, HHH, 1); }},
    {"poison-HHU", holds(19411), [](O& o) { poison(o, HHU, 1); }},
    {"poison-UHH", holds(3026), [](O& o) { poison(o, UHH, 0); }},
    {"poison-HUH", holds(7939), [](O& o) { poison(o, HUH, 1); }},
    {"lane-busy", holds(42200),
     [](O& o) {
       hang(o, UHU);
       o.hang_keeps_lane = o.lane_busy = true;
     }},
    {"lane-busy-UUH", holds(43657),
     [](O& o) {
       hang(o, UUH);
       o.hang_keeps_lane = o.lane_busy = true;
     }},
    {"order-201", holds(41099),
     [](O& o) {
       one_fault(o, UUH);
       o.order = "201";
     }},
    {"UHU-2-faults", holds(2725373), [](O& o) { two_faults(o, UHU); }},
    {"HHU-2-faults", holds(2944059), [](O& o) { two_faults(o, HHU); }},
    {"HUU-2-faults", holds(3108007), [](O& o) { two_faults(o, HUU); }},
    {"UHH-2-faults", holds(2871966), [](O& o) { two_faults(o, UHH); }},
    {"UUU-2-faults", holds(3'458'872), [](O& o) { two_faults(o, UUU); }},
    {"window-1-2-faults", holds(1225243),
     [](O& o) {
       two_faults(o, UHU);
       o.window = 1;
     }},
    {"window-3-2-faults", holds(3533057),
     [](O& o) {
       two_faults(o, HHU);
       o.window = 3;
     }},
    {"arrivals-2-faults", holds(2'565'883), [](O& o) { o.freezes = o.kills = 0; }},
    {"hint-changes-HUU", holds(3164426),
     [](O& o) {
       hint_changes(o, HUU);
       o.hint_in_frame = true;
     }},
    {"hint-changes-UHU", holds(2776793),
     [](O& o) {
       hint_changes(o, UHU);
       o.hint_in_frame = true;
     }},
    {"hint-changes-poison", holds(2076487),
     [](O& o) {
       hint_changes(o, HUH);
       o.hint_in_frame = true;
       o.poison = 0;
       o.limit = 3;
       o.flushes = o.freezes = 0;
     }},
    {"poison-1-fault", holds(981667),
     [](O& o) {
       one_fault(o, HHH);
       o.poison = 1;
       o.limit = 3;
       o.flushes = 0;
     }},
    {"poison-2-faults", holds(8689604),
     [](O& o) {
       two_faults(o, HHH);
       o.poison = 1;
       o.limit = 3;
       o.flushes = o.freezes = 0;
     }},
    {"UHU-3-cuts", holds(5'331'474),
     [](O& o) {
       two_faults(o, UHU);
       o.faults = 3;
       o.ends = o.freezes = o.flushes = 0;
     }},
    {"UHU-3-faults", holds_in_first(14'000'000),
     [](O& o) {
       two_faults(o, UHU);
       o.faults = 3;
       o.ends = 0;
     }},
    {"HHU-3-faults", holds_in_first(14'000'000),
     [](O& o) {
       two_faults(o, HHU);
       o.faults = 3;
       o.freezes = 0;
     }},
    {"X-hang-lane-not-told", breaks(W::NOT_STUCK, 152),
     [](O& o) {
       hang(o, UUH);
       o.faults = 0;
       o.hang_keeps_lane = true;
     }},
    {"X-hint-not-in-frame", breaks(W::NOT_UNDER_OTHER_HINT, 7409), [](O& o) { hint_changes(o, HUU); }},
    {"X-hint-not-in-journal-row", breaks(W::ONCE, 149035),
     [](O& o) {
       hint_changes(o, UHU);
       o.row_keeps_hint = false;
     }},
    {"X-no-window", breaks(W::NOT_STUCK, 224),
     [](O& o) {
       o.windowed = false;
       o.faults = 0;
     }},
    {"X-take-raises-epoch", breaks(W::IN_ORDER, 26001),
     [](O& o) {
       two_faults(o, UHU);
       o.take_raises_epoch = true;
     }},
    {"X-take-and-claim-at-once", breaks(W::NOT_TWICE_AT_ONCE, 437),
     [](O& o) {
       one_fault(o, UHU);
       o.one_call_at_a_time = false;
     }},
    {"X-own-not-claimed", breaks(W::IN_ORDER, 1733),
     [](O& o) {
       one_fault(o, UHU);
       o.own_entries_claimed = false;
     }},
    {"X-no-claim-after-a-lost-answer", breaks(W::IN_ORDER, 1292),
     [](O& o) {
       one_fault(o, UHU);
       o.claim_after_lost_answer = false;
     }},
    {"X-ids-not-dropped", breaks(W::NOT_TWICE_AT_ONCE, 1643),
     [](O& o) {
       one_fault(o, UHU);
       o.in_flight_dropped = false;
     }},
    {"X-in-flight-by-entry", breaks(W::NOT_TWICE_AT_ONCE, 2327),
     [](O& o) {
       one_fault(o, UHU);
       o.in_flight_by_job = false;
     }},
    {"X-in-flight-until-result", breaks(W::NOT_AFTER_OUTCOME, 5424),
     [](O& o) {
       one_fault(o, UHU);
       o.in_flight_until_settled = false;
     }},
    {"X-rest-of-claim-waits", breaks(W::IN_ORDER, 107825),
     [](O& o) {
       two_faults(o, UHU);
       o.rest_claimed_first = false;
     }},
    {"X-consumer-deleted-full", breaks(W::IN_ORDER, 2181),
     [](O& o) {
       one_fault(o, UHU);
       o.delete_full_consumers = true;
     }},
    {"X-lane-kept-not-joined", breaks(W::ONCE, 9591),
     [](O& o) {
       one_fault(o, UHU);
       o.lane_drops_waiting = o.lane_joins_waiting = false;
     }},
    // What waits in the lane may also be kept and joined, alone; with a sleep it gets stuck.
    {"lane-kept-joined", holds(43191),
     [](O& o) {
       one_fault(o, UHU);
       o.lane_drops_waiting = false;
     }},
    {"X-lane-kept-joined", breaks(W::NOT_STUCK, 22292),
     [](O& o) {
       two_faults(o, UHU);
       o.lane_drops_waiting = false;
       o.sleeps = 1;
       o.freezes = o.flushes = 0;
     }},
    {"X-hello-running-ignored", breaks(W::NOT_STUCK, 103936),
     [](O& o) {
       two_faults(o, UHU);
       o.hello_lists_running = false;
     }},
    {"X-deadline-on-receipt", breaks(W::NOT_LATE, 1749),
     [](O& o) {
       one_fault(o, UHU);
       o.deadline_at_start = false;
     }},
    {"X-sleep-by-timer", breaks(W::WELCOME_FIRST, 2147),
     [](O& o) {
       one_fault(o, UHU);
       o.sleeps = 1;
       o.sleep_noticed_at_start = false;
     }},
    {"X-poison-pipelined", breaks(W::INNOCENT, 2923),
     [](O& o) {
       poison(o, HHH, 0);
       o.marked_alone = false;
     }},
    {"X-poison-pipelined-HHU", breaks(W::INNOCENT, 9173),
     [](O& o) {
       poison(o, HHU, 1);
       o.marked_alone = false;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
