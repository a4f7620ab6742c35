// The custom elements of the page by name, and the details of their events. For tsc only.

import type { AttentionArcs } from "../../service/web/draw/arcs.js";
import type { CellGrid } from "../../service/web/draw/cell_grid.js";
import type { HeatMap } from "../../service/web/draw/heat_map.js";
import type { MatrixProduct } from "../../service/web/draw/matrix_product.js";
import type { PatternGrid } from "../../service/web/draw/pattern_grid.js";
import type { TokenStrip } from "../../service/web/draw/token_strip.js";
import type { AttentionHead } from "../../service/web/views/attention_head.js";
import type { AttentionRanking } from "../../service/web/views/attention_ranking.js";
import type { DirectAttribution } from "../../service/web/views/direct_attribution.js";
import type { EditComparison } from "../../service/web/views/edit_comparison.js";
import type { EditForm } from "../../service/web/views/edit_form.js";
import type { ForwardMap } from "../../service/web/views/forward_map.js";
import type { TourCard } from "../../service/web/network/tour_card.js";
import type { CellArithmetic } from "../../service/web/network/cell_arithmetic.js";
import type { NetworkCanvas } from "../../service/web/network/network_canvas.js";
import type { Spot } from "../../service/web/network/scene.js";
import type { NextTokens } from "../../service/web/views/next_tokens.js";
import type { StagePicture } from "../../service/web/views/stage_picture.js";
import type { StageValues } from "../../service/web/views/stage_card.js";
import type { TextContinuation } from "../../service/web/views/continuation.js";
import type { BothTexts } from "../../service/web/views/both_texts.js";
import type { PatchSweep } from "../../service/web/views/patch_sweep.js";
import type { SteerForm } from "../../service/web/views/steer_form.js";
import type { StageSearch } from "../../service/web/views/stage_search.js";
import type { Edit } from "../../service/web/answers.js";
import type { NamedEdit } from "../../service/web/views/edit_words.js";
import type { StageEntry } from "../../service/web/stages.js";

/** An element whose custom events have these details. */
type Emits<Element extends HTMLElement, Details> = {
  addEventListener<Name extends keyof Details>(
    type: Name,
    listener: (event: CustomEvent<Details[Name]>) => unknown,
  ): void;
} & Element;
type Cell = { row: number; column: number };
type Head = { layer: number; head: number };

declare global {
  interface HTMLElementTagNameMap {
    "attention-arcs": Emits<AttentionArcs, { query: { position: number }; point: { position: number | null } }>;
    "attention-head": Emits<
      AttentionHead,
      { change: Record<string, string>; ablate: null; trace: { query: number; key: number } }
    >;
    "attention-ranking": Emits<
      AttentionRanking,
      { choose: Head; target: { target: string }; pair: Record<string, string> }
    >;
    "tour-card": Emits<TourCard, { step: { step: number | null } }>;
    "both-texts": BothTexts;
    "cell-arithmetic": Emits<CellArithmetic, { go: { stage: string; row: number; column: number } }>;
    "cell-grid": Emits<CellGrid, { choose: { row: number; column: number } }>;
    "direct-attribution": Emits<
      DirectAttribution,
      { explain: { explain: string; minus: string }; ablate: { edit: Edit } }
    >;
    "edit-comparison": EditComparison;
    "edit-form": Emits<EditForm, { add: { edit: Edit } }>;
    "forward-map": Emits<
      ForwardMap,
      { layer: { layer: string }; stage: { name: string }; head: { head: string }; position: { position: number } }
    >;
    "heat-map": Emits<HeatMap, { cell: Cell | null; choose: Cell }>;
    "matrix-product": Emits<MatrixProduct, { choose: { row: number } }>;
    "network-canvas": Emits<
      NetworkCanvas,
      { choose: { spot: Spot; isName: boolean }; point: { spot: Spot | null }; settle: null }
    >;
    "next-tokens": Emits<NextTokens, { position: { position: number } }>;
    "pattern-grid": Emits<PatternGrid, { choose: Head; point: Head | null; visible: number[] }>;
    "patch-sweep": Emits<PatchSweep, { sweep: { other: string }; add: { edit: Edit } }>;
    "stage-search": Emits<StageSearch, { go: { stage: StageEntry } }>;
    "stage-picture": StagePicture;
    "stage-values": Emits<StageValues, { head: { head: string } }>;
    "steer-form": Emits<SteerForm, { add: { edit: NamedEdit }; fail: { error: unknown } }>;
    "text-continuation": TextContinuation;
    "token-strip": Emits<TokenStrip, { choose: { index: number } }>;
  }
}
