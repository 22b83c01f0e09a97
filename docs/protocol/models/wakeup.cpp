// The variants of the wake-up (wakeup.hpp has the model): first what we run, then the three scripts apart, each
// followed by what breaks without one of its parts.
#include "wakeup.hpp"

using O = Wakeup::Options;
constexpr auto PROMPTLY = Checker<Wakeup>::PROMPTLY;

void three_faults(O& o) {
  o.drops = 2;
  o.faults = 3;
}
void flush_with_clock_back(O& o) {
  o.clock_back = true;
  o.drops = o.kills = 0;
  o.faults = 1;
}

const std::vector<Variant<Wakeup>> VARIANTS = {
    // What we run.
    {"serve", holds(313570), [](O& o) { o.serve = true; }},
    {"serve-lost-answers", holds(328048),
     [](O& o) {
       o.serve = true;
       o.lost_answers = 2;
     }},
    {"serve-lost-notes", holds(316631),
     [](O& o) {
       o.serve = true;
       o.lost_notes = 2;
     }},
    {"serve-window-2", holds(816952),
     [](O& o) {
       o.serve = true;
       o.window = 2;
       o.lost_answers = 1;
     }},
    {"serve-clock-back", holds(3128),
     [](O& o) {
       o.serve = true;
       flush_with_clock_back(o);
     }},
    {"serve-window-2-3-cuts", holds(16'207'660),
     [](O& o) {
       o.serve = true;
       o.window = 2;
       o.flushes = 0;
       three_faults(o);
     }},
    {"X-serve-debt-lost-without-a-place", breaks(PROMPTLY, 1024),
     [](O& o) {
       o.serve = true;
       o.faults = 0;
       o.debt_outlives_full_window = false;
     }},
    {"X-serve-full-answer-not-followed", breaks(PROMPTLY, 1042),
     [](O& o) {
       o.serve = true;
       o.faults = 0;
       o.full_answer_repeats = false;
     }},
    {"X-serve-note-in-call-dropped", breaks(PROMPTLY, 638),
     [](O& o) {
       o.serve = true;
       o.faults = 0;
       o.note_in_call_counts = false;
     }},
    {"X-serve-freed-place-not-used", breaks(PROMPTLY, 874),
     [](O& o) {
       o.serve = true;
       o.faults = 0;
       o.take_when_freed = false;
     }},
    {"X-serve-not-after-a-lost-answer", breaks(PROMPTLY, 57010),
     [](O& o) {
       o.serve = true;
       o.faults = 1;
       o.lost_answers = 1;
       o.serve_after_lost_answer = false;
     }},
    {"X-serve-clock-back-cursor-kept", breaks(PROMPTLY, 2886),
     [](O& o) {
       o.serve = true;
       flush_with_clock_back(o);
       o.rewind_when_reborn = false;
     }},
    // Three scripts.
    {"apart", holds(53326), [](O&) {}},
    {"apart-lost-notes", holds(122299),
     [](O& o) {
       o.lost_notes = 2;
       o.faults = 3;
     }},
    {"apart-assert-then-take", holds(52608), [](O& o) { o.take_with_assert = false; }},
    {"apart-clock-back", holds(1254), flush_with_clock_back},
    {"apart-take-only-if-owed-window-2", holds(168198),
     [](O& o) {
       o.take_when_freed_only_if_owed = true;
       o.window = 2;
     }},
    {"apart-take-only-if-owed-lost-notes", holds(122299),
     [](O& o) {
       o.take_when_freed_only_if_owed = true;
       o.lost_notes = 2;
       o.faults = 3;
     }},
    {"apart-take-only-if-owed", holds(1'320'935),
     [](O& o) {
       o.take_when_freed_only_if_owed = true;
       three_faults(o);
     }},
    {"apart-window-2", holds(5'536'639),
     [](O& o) {
       o.window = 2;
       three_faults(o);
     }},
    {"X-clock-back-cursor-kept", breaks(PROMPTLY, 1254),
     [](O& o) {
       flush_with_clock_back(o);
       o.rewind_when_reborn = false;
     }},
    {"X-freed-place-not-used", breaks(PROMPTLY, 386),
     [](O& o) {
       o.take_when_freed = o.full_answer_repeats = o.note_in_call_counts = false;
       o.faults = 0;
     }},
    {"X-note-in-call-dropped", breaks(PROMPTLY, 798),
     [](O& o) {
       o.note_in_call_counts = o.full_answer_repeats = false;
       o.window = 3;
       o.faults = 0;
     }},
    {"X-no-take-after-assert", breaks(PROMPTLY, 9524),
     [](O& o) {
       o.take_after_assert = false;
       o.faults = 1;
     }},
    {"X-no-take-at-heartbeat", breaks(Wakeup::ONE_HEARTBEAT, 1276),
     [](O& o) {
       o.take_at_heartbeat = false;
       o.lost_notes = 1;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
